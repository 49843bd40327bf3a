"""A function for the worker daemon beside a Synapse: read the receipts stream by field name."""

from replication.synapse import RECEIPTS


def register(worker):
    @worker.on("receipts")
    async def apply(facts, txn):
        for fact in facts:
            for receipt in RECEIPTS.read(fact):
                print(receipt.user_id, "has read", receipt.event_id, flush=True)
