"""What tests share: models, processes, commands, servers, networks."""
