//! The folder `/app`: instructions, MCP servers and configuration for every agent. Pid 1 writes it
//! at each boot, after the checkouts are there; all other processes, root included, can only read
//! it. It contains no secret.

mod acp;
mod mcp;
mod memory;
mod opencode;
mod shell;

use std::{io, os::fd::OwnedFd, path::Path};

use harvest_proto::{McpServerName, api::MemoryGraph, bridge::AgentLaunch};
use rustix::fs::{Mode, OFlags};
use serde_json::{Map, Value, json};

pub(crate) use self::{
    acp::{RemoteServers, servers as acp_servers},
    mcp::FILES as SERVER_FILES,
    memory::seed as memory_seed,
    shell::{
        CLAUDE_STATE, WRITE_MISSING, claude_state, env, link_codex_config, linked_rules,
        missing_files,
    },
};
use crate::users::User;

/// Rules that every agent follows.
const RULES: &str = include_str!("AGENTS.md");

/// The rules as a file.
pub(crate) const RULES_FILE: &str = "/app/AGENTS.md";

/// The MCP servers, in the format of `.mcp.json`.
pub(crate) const MCP_CONFIG: &str = "/app/mcp.json";

/// OpenCode's configuration.
pub(crate) const OPENCODE_CONFIG: &str = "/app/opencode.json";

/// Codex's configuration.
const CODEX_CONFIG: &str = "/app/codex.toml";

/// What an agent that works in `cwd` is told in addition to the prompt.
pub(crate) fn instructions(cwd: &str) -> String {
    format!("{RULES}\nYour working directory is {cwd}.\n")
}

/// MCP servers by name, as in `.mcp.json`.
pub(crate) type Servers = Map<String, Value>;

/// What the files depend on.
pub(crate) struct Content<'a> {
    /// Where the agent works.
    pub(crate) cwd: String,
    pub(crate) servers: &'a Servers,
    pub(crate) launch: &'a AgentLaunch,
    /// The folders that agents work in.
    pub(crate) folders: &'a [String],
    /// OpenCode's configuration without MCP servers.
    pub(crate) opencode: Value,
    /// The first entities of the repository's memory.
    pub(crate) seed: MemoryGraph,
}

/// The MCP servers of the image, of these checkouts and at the door, and warnings about files that
/// cannot be used.
pub(crate) fn servers(
    checkouts: &[String],
    user: &User,
    at_the_door: &[McpServerName],
) -> (Servers, Vec<String>) {
    let installed = |program: &str| Path::new("/usr/local/bin").join(program).exists();
    mcp::servers(checkouts, user, at_the_door, installed)
}

/// The MCP servers that were written at the last boot; none without the folder.
pub(crate) fn written_servers() -> Servers {
    let text = std::fs::read_to_string(MCP_CONFIG).unwrap_or_default();
    let file: Value = serde_json::from_str(&text).unwrap_or_default();
    file["mcpServers"].as_object().cloned().unwrap_or_default()
}

/// Writes all files.
pub(crate) fn write(folder: &OwnedFd, content: Content<'_>) -> io::Result<()> {
    let Content { cwd, servers, launch, folders, mut opencode, seed } = content;
    let rules = instructions(&cwd);
    let codex = shell::codex_config(launch, &rules, folders, servers);
    opencode["mcp"] = opencode::servers(servers).into();
    for (name, text) in [
        ("AGENTS.md", rules),
        // Without indentation, which would multiply deeply nested text of a repository.
        ("mcp.json", json!({ "mcpServers": servers }).to_string()),
        ("opencode.json", opencode.to_string()),
        ("codex.toml", codex),
        ("memory-seed.json", json!(seed).to_string()),
    ] {
        write_file(folder, name, &text)?;
    }
    Ok(())
}

pub(crate) fn write_file(folder: &OwnedFd, name: &str, text: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o644))?;
    io::Write::write_all(&mut std::fs::File::from(file), text.as_bytes())
}

#[cfg(test)]
mod tests {
    use harvest_proto::launch::APP_FOLDER;

    use super::*;

    #[test]
    fn paths_are_below_the_folder() {
        for path in [MCP_CONFIG, OPENCODE_CONFIG, CODEX_CONFIG, RULES_FILE] {
            assert!(path.starts_with(&format!("{APP_FOLDER}/")), "{path}");
        }
    }

    #[test]
    fn rules_cover_execution_isolation_and_delivery() {
        for rule in [
            "Act, do not ask",
            "Repair what breaks",
            "Finish the work",
            "isolated",
            "push",
            "git stash",
        ] {
            assert!(RULES.contains(rule), "{rule}");
        }
        assert!(instructions("/workspace/shop").ends_with("directory is /workspace/shop.\n"));
    }
}
