"""Token trees: what a drafter proposes, a target evaluates and a verifier walks."""
