"""Who may call, as which tenant, and how much of everything is theirs."""
