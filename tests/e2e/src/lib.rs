//! What the end-to-end tests share: a host with its own home, port and server.
