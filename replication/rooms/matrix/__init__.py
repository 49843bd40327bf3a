"""State resolution of the Matrix specification: version 1, and version 2 for room versions 2 and later."""
