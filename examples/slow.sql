\! sleep 2
BEGIN;
INSERT INTO payments (payer, amount) VALUES ('slow', 1);
\! psql -q shop -c "INSERT INTO payments (payer, amount) VALUES ('quick', 1)"
\! sleep 2; replication status
COMMIT;
