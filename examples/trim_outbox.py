"""Delete the rows of the outbox that every known follower has applied: run it, for example, each day."""

import json
from urllib.request import urlopen

import psycopg

STREAM, WRITER = "changes", "master"

with urlopen("http://127.0.0.1:9093/v1/followers", timeout=60) as answer:
    followers = json.load(answer)["followers"]
applied = {each["name"]: each["positions"][STREAM] for each in followers if STREAM in each["positions"]}
upto = min((positions.get(WRITER, 0) for positions in applied.values()), default=0)
with psycopg.connect("postgresql:///shop") as database:
    old = "DELETE FROM outbox WHERE id <= %s AND written < now() - interval '5 seconds'"
    print(f"{database.execute(old, [upto]).rowcount} rows up to {upto} are deleted; known: {', '.join(applied)}")
