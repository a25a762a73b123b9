"""HELLO_ATTN, an attention backend for attnmux."""
