"""A batch query: visits per minute and writer."""

from pyspark.sql.functions import date_trunc

from replication.replay import ReplicationDataSource, open_session

with open_session("local[*]") as spark:
    spark.dataSource.register(ReplicationDataSource)
    visits = spark.read.format("replication").options(stream="visits", fields=True).load()
    minute = date_trunc("minute", "at").alias("minute")
    visits.groupBy(minute, "instance").count().orderBy("minute", "instance").show(3)
