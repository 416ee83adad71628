"""The pure core: decides and changes state; does no I/O and knows no clock."""
