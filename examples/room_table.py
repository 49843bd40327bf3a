"""A batch query: events per room and minute, from segments of the stream event_times."""

from pyspark.sql.functions import col, date_trunc, from_json, regexp_extract, timestamp_millis

from replication.replay import open_session

with open_session("local[*]") as spark:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    lines = spark.read.text("segments/event_times/*/*.gz")  # RDATA event_times persister1 17 ["$event","!room",…]
    row = from_json(regexp_extract("value", r"\[.*", 0), "array<string>")
    minute = date_trunc("minute", timestamp_millis(row[3].cast("long")))
    table = lines.select(row[1].alias("room"), minute.alias("minute")).groupBy("room", "minute").count()
    table.orderBy(col("minute").desc(), "room").show(5, truncate=False)
