//! Turns the tables `[mcp.NAME]` into the gateway's MCP servers. A table of a built-in one changes
//! only what it says.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use harvest_gateway::{McpServer, McpServerKind, McpServers, PrivateHosts, vault::SecretName};
use harvest_proto::McpServerName;

use super::{Env, keys::McpTable, upstreams::unusable_url};
use crate::printer::Advice;

/// The servers that have settings: the built-in ones and those of the file.
pub(super) fn named<T>(file: &BTreeMap<String, T>) -> impl Iterator<Item = String> + use<T> {
    let built_in = McpServers::default();
    let mut names: Vec<String> = built_in.iter().map(|(name, _)| name.to_string()).collect();
    names.extend(file.keys().filter(|name| !names.contains(name)).cloned().collect::<Vec<_>>());
    names.into_iter()
}

/// The table of a server, as `harvest config` names it.
pub(super) fn table_of(name: &str) -> String {
    format!("mcp.{name}")
}

pub(super) fn mcp_servers(
    mut file: BTreeMap<String, McpTable>,
    private_hosts: &[String],
    env: Env,
) -> Result<McpServers> {
    let private_hosts = PrivateHosts::new(private_hosts.to_vec());
    named(&file).collect::<Vec<_>>().into_iter().try_fold(McpServers::default(), |all, name| {
        let table = file.remove(&name).unwrap_or_default().resolve(&table_of(&name), env)?;
        let enabled = table.enabled != Some(false);
        let (name, server) = server(&all, &name, table, &private_hosts)
            .with_context(|| format!("`[{}]` cannot be used", table_of(&name)))?;
        Ok(if enabled { all.with(name, server) } else { all.without(&name) })
    })
}

fn server(
    built_in: &McpServers,
    name: &str,
    table: McpTable,
    private_hosts: &PrivateHosts,
) -> Result<(McpServerName, McpServer)> {
    let name: McpServerName = name.parse()?;
    let base = built_in.get(&name);
    let url = table.url.or_else(|| base.map(|base| base.url.clone()));
    let url = url.ok_or_else(|| {
        Advice::new("the key `url` is missing", "add `url = \"https://mcp.example.org/mcp\"`")
    })?;
    if let Some(secret) = &table.secret {
        secret.parse::<SecretName>().with_context(|| format!("`secret` is `{secret}`"))?;
    }
    let kind = base.map_or(McpServerKind::Remote, |base| base.kind);
    let secret = table.secret.or_else(|| base.and_then(|base| base.secret.clone()));
    let server = McpServer { kind, url, secret };
    server.check_url(private_hosts).map_err(unusable_url)?;
    Ok((name, server))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::GlobalFlags, config::Config, printer::hint_of};

    fn load(text: &str, vars: &[(&str, &str)]) -> Result<McpServers> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        Ok(Config::merge(&GlobalFlags::default(), &env, crate::config::parse(text)?)?.mcp_servers)
    }

    #[test]
    fn file_adds_servers_and_changes_built_in_ones() {
        let text = "[mcp.wiki]\nurl = \"http://localhost:9/mcp\"\n";
        let vars = [
            ("HARVEST_MCP_GITHUB_URL", "https://ghe.example/mcp"),
            ("HARVEST_MCP_WIKI_SECRET", "W"),
        ];
        let servers = load(text, &vars).unwrap();
        let get = |name: &str| servers.get(&name.parse().unwrap()).unwrap().clone();
        let (wiki, github) = (get("wiki"), get("github"));
        assert_eq!((wiki.kind, wiki.secret.as_deref()), (McpServerKind::Remote, Some("W")));
        assert_eq!(github.url, "https://ghe.example/mcp");
        assert_eq!(github.secret.as_deref(), Some("GITHUB_TOKEN"));
        assert_eq!(load("", &[]).unwrap(), McpServers::default());
    }

    #[test]
    fn disabled_servers_are_left_out() {
        let vars = [("HARVEST_MCP_LINEAR_ENABLED", "false")];
        let servers = load("[mcp.github]\nenabled = false\n", &vars).unwrap();
        let names: Vec<_> = servers.iter().map(|(name, _)| name.to_string()).collect();
        assert_eq!(names, ["gemini", "sentry"]);
    }

    #[test]
    fn unusable_servers_are_refused_with_a_hint() {
        for (text, message, hint) in [
            ("[mcp.wiki]\nsecret = \"W\"", "`url` is missing", "url = "),
            (
                "[mcp.wiki]\nurl = \"http://w.example\"",
                "plain http to `w.example`",
                "private_hosts",
            ),
            ("[mcp.wiki]\nurl = \"w.example\"", "not an http or https URL", ""),
            ("[mcp.harvest]\nurl = \"https://w.example\"", "invalid MCP server `harvest`", ""),
            ("[mcp.github]\nsecret = \"a b\"", "`secret` is `a b`", ""),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(format!("{error:#}").contains(message), "{error:#}");
            assert!(hint_of(&error).unwrap_or_default().contains(hint), "{error:#}");
        }
    }
}
