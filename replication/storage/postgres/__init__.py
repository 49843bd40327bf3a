"""The PostgreSQL store: several processes write one database."""
