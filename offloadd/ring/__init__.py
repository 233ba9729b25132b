"""Endpoints: where requests come from and replies go. One per session; the pump drains and posts.

An endpoint validates what a client wrote, after copying it out once, and bounds what is in flight so that a reply
always has room. It decides nothing and touches no tile, except that the stream endpoint carries tiles' bytes.
"""
