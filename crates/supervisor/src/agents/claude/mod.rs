//! Claude Code over its own line protocol (`stream-json`), one long-lived process per sandbox.

pub(crate) mod command;
mod map;
pub(crate) mod wire;

pub(crate) use self::map::Claude;
