"""A serving cluster on a virtual clock: replicas, pools, disks and links, and routers in front."""
