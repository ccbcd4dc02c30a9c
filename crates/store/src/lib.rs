//! Remembers sessions, prompts, turns, events, images and leases.
