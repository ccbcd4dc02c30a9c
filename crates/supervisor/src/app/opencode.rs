//! MCP servers in the format of OpenCode's configuration.

use serde_json::{Map, Value, json};

/// The servers of `.mcp.json` in OpenCode's format.
pub(super) fn servers(servers: &Map<String, Value>) -> Map<String, Value> {
    servers.iter().filter_map(server).collect()
}

/// A server of `.mcp.json` in OpenCode's format; `None` for one without a command and a URL.
fn server((name, server): (&String, &Value)) -> Option<(String, Value)> {
    let texts = |value: &Value| value.as_str().map(variables);
    let table = |key: &str| -> Map<String, Value> {
        let entries = server[key].as_object().into_iter().flatten();
        entries.filter_map(|(name, value)| Some((name.clone(), texts(value)?.into()))).collect()
    };
    if let Some(url) = server["url"].as_str() {
        let (url, headers) = (variables(url), table("headers"));
        let remote = json!({ "type": "remote", "url": url, "headers": headers, "enabled": true });
        return Some((name.clone(), remote));
    }
    let arguments = server["args"].as_array().into_iter().flatten().filter_map(texts);
    let command: Vec<String> =
        [variables(server["command"].as_str()?)].into_iter().chain(arguments).collect();
    let env = table("env");
    let local = json!({ "type": "local", "command": command, "environment": env, "enabled": true });
    Some((name.clone(), local))
}

/// Turns `${NAME}` into `{env:NAME}`.
fn variables(text: &str) -> String {
    text.replace("${", "{env:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_translated() {
        let servers = json!({
            "local": {"command": "run", "args": ["-x"], "env": {"KEY": "${TOKEN}"}},
            "remote": {"type": "http", "url": "https://h/mcp", "headers": {"A": "b"}},
            "neither": {},
        });
        let mcp = super::servers(servers.as_object().unwrap());
        assert_eq!(mcp["local"]["command"], json!(["run", "-x"]));
        assert_eq!(mcp["local"]["environment"], json!({"KEY": "{env:TOKEN}"}));
        assert_eq!(
            (&mcp["remote"]["type"], &mcp["remote"]["headers"]["A"]),
            (&json!("remote"), &json!("b"))
        );
        assert!(!mcp.contains_key("neither"));
    }
}
