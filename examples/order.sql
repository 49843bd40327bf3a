\set ON_ERROR_STOP on
BEGIN;
INSERT INTO orders VALUES (:'order', 'pen');
UPDATE stock SET available = available - 1 WHERE item = 'pen';
INSERT INTO outbox (kind, body) VALUES ('placed', jsonb_build_object('order', :'order', 'item', 'pen'));
COMMIT;
