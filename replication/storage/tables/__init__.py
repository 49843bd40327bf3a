"""Further tables, for both databases: rooms, the last client IPs of users, and the numbers of instances."""
