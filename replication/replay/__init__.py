"""History as RDATA: segments written by Spark, read for catch-up, and streams as a Spark source."""
