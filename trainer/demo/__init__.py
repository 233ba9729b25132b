"""The demonstration: a small decoder trained from a budget smaller than its states, beside the same run without
offload. `make demo` runs it; `python -m trainer.demo --help` says what can be changed."""
