"""Writing streams: IDs are reserved, facts are committed, settled facts are published to subscribers."""
