"""A streaming query: count the visits of each micro-batch."""

from replication.replay import ReplicationDataSource, open_session


def show(visits, batch):
    for instance, count in visits.groupBy("instance").count().collect():
        print(f"batch {batch}: {count} visits, written by {instance}", flush=True)


with open_session("local[*]") as spark:
    spark.dataSource.register(ReplicationDataSource)
    visits = spark.readStream.format("replication").option("stream", "visits").load()
    query = visits.writeStream.foreachBatch(show).option("checkpointLocation", "live").start()
    query.awaitTermination()
