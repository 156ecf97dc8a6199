"""Objects built ahead of time: compiling them, describing them, and the gates on them."""
