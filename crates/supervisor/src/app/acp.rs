//! MCP servers in the format of the Agent Client Protocol.

use serde_json::{Map, Value, json};

/// The kinds of MCP servers that an agent reaches over the network; programs all agents start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RemoteServers {
    pub(crate) http: bool,
    pub(crate) sse: bool,
}

/// The servers of `.mcp.json` that an agent can use, as `session/new` takes them. Variables in
/// their texts are looked up with `env`.
pub(crate) fn servers(
    servers: &Map<String, Value>,
    remote: RemoteServers,
    env: impl Fn(&str) -> Option<String>,
) -> Vec<Value> {
    servers.iter().filter_map(|(name, one)| server(name, one, remote, &env)).collect()
}

fn server(
    name: &str,
    server: &Value,
    remote: RemoteServers,
    env: &dyn Fn(&str) -> Option<String>,
) -> Option<Value> {
    let text = |value: &Value| value.as_str().map(|text| expand(text, env));
    let pairs = |key: &str| -> Vec<Value> {
        let entries = server[key].as_object().into_iter().flatten();
        entries
            .filter_map(|(name, value)| Some(json!({ "name": name, "value": text(value)? })))
            .collect()
    };
    if let Some(url) = text(&server["url"]) {
        let kind = server["type"].as_str().unwrap_or("http");
        let usable = if kind == "sse" { remote.sse } else { remote.http };
        let kind = if kind == "sse" { "sse" } else { "http" };
        let remote = json!({ "type": kind, "name": name, "url": url, "headers": pairs("headers") });
        return usable.then_some(remote);
    }
    let command = text(&server["command"])?;
    let args: Vec<String> =
        server["args"].as_array().into_iter().flatten().filter_map(text).collect();
    Some(json!({ "name": name, "command": command, "args": args, "env": pairs("env") }))
}

/// Replaces `${NAME}` and `${NAME:-default}`; a variable that is not set becomes empty.
fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>) -> String {
    let mut parts = text.split("${");
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let Some((variable, rest)) = part.split_once('}') else {
            expanded += "${";
            expanded += part;
            continue;
        };
        let (name, default) = variable.split_once(":-").unwrap_or((variable, ""));
        expanded += &env(name).unwrap_or_else(|| default.to_owned());
        expanded += rest;
    }
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        (name == "TOKEN").then(|| "t".to_owned())
    }

    #[test]
    fn agent_gets_only_servers_it_can_use() {
        let all = json!({
            "local": {"command": "run", "args": ["-x", "${TOKEN}"], "env": {"KEY": "${TOKEN}"}},
            "remote": {"type": "http", "url": "https://h/${OTHER:-mcp}", "headers": {"A": "b"}},
            "old": {"type": "sse", "url": "https://h/sse"},
            "neither": {},
        });
        let names = |remote| -> Vec<String> {
            let found = servers(all.as_object().unwrap(), remote, env);
            found.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(RemoteServers::default()), ["local"]);
        assert_eq!(names(RemoteServers { http: true, sse: false }), ["local", "remote"]);
        let both = servers(all.as_object().unwrap(), RemoteServers { http: true, sse: true }, env);
        let local = json!({"name": "local", "command": "run", "args": ["-x", "t"],
            "env": [{"name": "KEY", "value": "t"}]});
        let remote = json!({"type": "http", "name": "remote", "url": "https://h/mcp",
            "headers": [{"name": "A", "value": "b"}]});
        assert!(both.contains(&local) && both.contains(&remote), "{both:?}");
        assert_eq!(both.len(), 3);
    }

    #[test]
    fn variables_are_replaced_like_in_a_shell() {
        for (text, expected) in
            [("a${TOKEN}b", "atb"), ("${NONE}", ""), ("${NONE:-x}${TOKEN}", "xt"), ("${", "${")]
        {
            assert_eq!(expand(text, &env), expected);
        }
    }
}
