"""Which users sync at which process, and where users were last seen."""
