"""`steelyard view`: a local page over the runs in a folder, live while one of them is being written."""
