"""Schedules own the loop: when to draft, verify and commit. The only place where drafter, target and verifier meet."""
