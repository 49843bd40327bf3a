CREATE TABLE stock (item text PRIMARY KEY, available int NOT NULL CHECK (available >= 0));
CREATE TABLE orders (id text PRIMARY KEY, item text NOT NULL);
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    body jsonb NOT NULL,
    written timestamptz NOT NULL DEFAULT now()
);
INSERT INTO stock VALUES ('pen', 2);
