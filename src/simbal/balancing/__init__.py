"""Ways of balancing a router, one file each."""
