"""The network lab: replicas in network namespaces of their own, trained over a link as slow as asked."""
