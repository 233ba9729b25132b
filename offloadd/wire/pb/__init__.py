"""Generated from proto/ by tools/stubs.py; do not edit."""
