//! The same for requests of the Responses and Chat Completions APIs.
//!
//! | in the request | `none` | `trusted` |
//! |---|---|---|
//! | `image_url`, `file_url` and the like, a URL as `file_data`, `server_url` of an `mcp` tool | refused | the host must be allowed |
//! | live web search, connectors, containers with a network | refused | refused: they reach hosts of the session's choice |
//! | other server-side tools, stored prompts, other `plugins` | refused | allowed |
//! | `data:` URLs, tools that run in the sandbox | allowed | allowed |
//! | `background` | refused | refused: its tokens could not be counted |

use harvest_proto::NetworkPolicy;

use super::{OutsideError, check_url, node::Node};
use crate::ledger::ResolvedPolicy;

/// Types of tools that the agent runs itself, or that reach nothing.
const HARMLESS_TOOLS: [&str; 7] = [
    "function",
    "custom",
    "local_shell",
    "apply_patch",
    "tool_search",
    "computer",
    "computer_use_preview",
];
/// Types of tools that run at the service and reach no host of the session's choice.
const HOSTED_TOOLS: [&str; 4] =
    ["file_search", "image_generation", "code_interpreter", "programmatic_tool_calling"];
const WEB_SEARCH: &str = "web_search";

/// Checks a request.
pub(super) fn check(body: &[u8], policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    Node::fields(body)?.iter().try_for_each(|(name, value)| check_field(name, value, policy))
}

fn check_field(name: &str, value: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let not_allowed = |what: String| Err(OutsideError::NotAllowed(what));
    match (name, value) {
        ("background", Node::Null | Node::Bool(false)) => Ok(()),
        ("background", _) => {
            Err(OutsideError::Malformed("`background` is not supported".to_owned()))
        }
        (_, Node::Null) => Ok(()),
        ("model", Node::Text(model)) if searches(model) => not_allowed(format!("model `{model}`")),
        // Models to use when the first one fails.
        ("models", Node::List(models)) => {
            models.iter().try_for_each(|model| check_field("model", model, policy))
        }
        ("web_search_options", _) => not_allowed(WEB_SEARCH.to_owned()),
        ("search_parameters", _) => not_allowed(name.to_owned()),
        ("plugins", plugins) => check_plugins(plugins, policy),
        // A prompt stored at the service may come with tools of its own.
        ("prompt", Node::Object(_)) if policy.base == NetworkPolicy::None => {
            not_allowed("stored prompt".to_owned())
        }
        ("tools", tools) => check_tools(tools, policy),
        (_, value) => check_urls(value, policy),
    }
}

/// Whether a model searches on its own.
fn searches(model: &str) -> bool {
    model.contains("-search-")
        || model.ends_with("-search")
        || model.contains("deep-research")
        || model.split(':').skip(1).any(|variant| variant.eq_ignore_ascii_case("online"))
}

/// Checks OpenRouter's plugins, of which `web` is a live search.
fn check_plugins(plugins: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let Node::List(list) = plugins else {
        return Err(OutsideError::Malformed("`plugins` is not a list".to_owned()));
    };
    let trusted = policy.base != NetworkPolicy::None;
    match list.iter().find(|plugin| !trusted || is_search_plugin(plugin)) {
        Some(_) => Err(OutsideError::NotAllowed("plugins".to_owned())),
        None => check_urls(plugins, policy),
    }
}

fn is_search_plugin(plugin: &Node) -> bool {
    !matches!(plugin.get("id"), Some(Node::Text(id)) if !id.starts_with("web"))
}

fn check_tools(tools: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let Node::List(tools) = tools else {
        return Err(OutsideError::Malformed("`tools` is not a list".to_owned()));
    };
    tools.iter().try_for_each(|tool| check_tool(tool, policy))
}

fn check_tool(tool: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let kind = match tool.get("type") {
        Some(Node::Text(kind)) => kind.as_str(),
        // Tools that an earlier response listed have none.
        None if matches!(tool, Node::Object(_)) => "function",
        _ => return Err(OutsideError::Malformed("a tool has no type".to_owned())),
    };
    let not_allowed = || Err(OutsideError::NotAllowed(format!("tool `{kind}`")));
    if HARMLESS_TOOLS.contains(&kind) || runs_locally(kind, tool) {
        return Ok(());
    }
    if kind == "namespace" {
        return tool.get("tools").map_or(Ok(()), |tools| check_tools(tools, policy));
    }
    if kind == "mcp" {
        return match (tool.get("server_url"), tool.get("connector_id")) {
            (Some(Node::Text(url)), None) => check_url(url, policy),
            _ => not_allowed(),
        };
    }
    check_urls(tool, policy)?;
    // A search that reads stored pages only.
    let cached = (kind == WEB_SEARCH || kind.starts_with("web_search_20"))
        && matches!(tool.get("external_web_access"), Some(Node::Bool(false)));
    let hosted = HOSTED_TOOLS.contains(&kind) && !tool.contains_key("network_policy");
    match policy.base {
        NetworkPolicy::Trusted | NetworkPolicy::Full if cached || hosted => Ok(()),
        _ => not_allowed(),
    }
}

fn runs_locally(kind: &str, tool: &Node) -> bool {
    let environment = tool.get("environment").and_then(|environment| environment.get("type"));
    kind == "shell"
        && match (tool.get("environment"), environment) {
            (None | Some(Node::Null), _) => true,
            (_, Some(Node::Text(place))) => place == "local",
            _ => false,
        }
}

/// Checks every URL that the service would fetch, at any depth.
fn check_urls(node: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    match node {
        Node::List(items) => items.iter().try_for_each(|item| check_urls(item, policy)),
        Node::Object(fields) => fields.iter().try_for_each(|(name, value)| {
            let url = match value {
                Node::Text(url) => Some(url),
                nested => match nested.get("url") {
                    Some(Node::Text(url)) => Some(url),
                    _ => None,
                },
            };
            match url {
                Some(url) if name.ends_with("_url") => check_source(url, policy)?,
                // Compatible services fetch it when it is a URL; base64 has no colon.
                Some(data) if name == "file_data" && data.contains(':') => {
                    check_source(data, policy)?;
                }
                // Items of the conversation may bring further tools.
                None if name == "tools" && matches!(value, Node::List(_)) => {
                    check_tools(value, policy)?;
                }
                _ => {}
            }
            check_urls(value, policy)
        }),
        Node::Null | Node::Bool(_) | Node::Number | Node::Text(_) => Ok(()),
    }
}

fn check_source(url: &str, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let data = url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    if data { Ok(()) } else { check_url(url, policy) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(request: &Value, policy: &ResolvedPolicy) -> Option<String> {
        match check(request.to_string().as_bytes(), policy) {
            Ok(()) => None,
            Err(OutsideError::NotAllowed(name) | OutsideError::Malformed(name)) => Some(name),
        }
    }

    fn trusted() -> ResolvedPolicy {
        ResolvedPolicy::of(NetworkPolicy::Trusted, &["files.example.org"])
    }

    fn with_url(url: &str) -> [Value; 8] {
        let image = json!({"type": "input_image", "image_url": url});
        let item = |content: Value| json!({"input": [{"role": "user", "content": [content]}]});
        [
            item(image.clone()),
            item(json!({"type": "input_file", "file_url": url})),
            item(json!({"type": "input_file", "file_data": url})),
            json!({"input": [{"type": "function_call_output", "call_id": "c", "output": [image]}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": url}}]}]}),
            json!({"messages": [{"role": "tool", "content": [{"type": "video_url", "video_url": {"url": url}}]}]}),
            json!({"tools": [{"type": "mcp", "server_label": "m", "server_url": url}]}),
        ]
    }

    #[test]
    fn fetched_urls_are_refused_at_any_depth() {
        for request in with_url("https://evil.example/?data") {
            for policy in [ResolvedPolicy::of(NetworkPolicy::None, &[]), trusted()] {
                assert_eq!(
                    refused(&request, &policy).as_deref(),
                    Some("evil.example"),
                    "{request}"
                );
            }
        }
        for request in with_url("https://files.example.org/a.png") {
            assert_eq!(refused(&request, &trusted()), None, "{request}");
            assert!(
                refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some(),
                "{request}"
            );
        }
        for url in ["file:///etc/passwd", "s3://bucket/key", "https://files.example.org:8443/a"] {
            for request in with_url(url) {
                assert!(refused(&request, &trusted()).is_some(), "{request}");
            }
        }
    }

    #[test]
    fn plain_requests_pass_with_every_policy() {
        let [mut images @ .., _] = with_url("data:image/png;base64,aGk=");
        let schema = json!({"type": "object", "properties": {"image_url": {"type": "string"}}});
        images[0]["tools"] = json!([
            {"type": "function", "name": "exec_command", "parameters": schema},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "local_shell"}, {"type": "shell"}, {"type": "shell", "environment": {"type": "local"}},
            {"type": "namespace", "name": "mcp__memory", "tools": [{"type": "function", "name": "f"}]},
        ]);
        images[1]["text"] = json!({"format": {"type": "json_schema", "schema": schema}});
        images[2]["input"][0]["content"][0]["file_data"] = json!("JVBERi0xLjQ=");
        images[2]["background"] = json!(false);
        let cited = json!({"type": "url_citation", "url": "https://evil.example"});
        images[4]["messages"][0]["annotations"] = json!([cited]);
        for request in &images {
            assert_eq!(
                refused(request, &ResolvedPolicy::of(NetworkPolicy::None, &[])),
                None,
                "{request}"
            );
        }
    }

    #[test]
    fn server_side_tools_are_refused_by_policy() {
        let network = json!({"type": "allowlist", "allowed_domains": ["evil.example"]});
        for (tool, none, some) in [
            (json!({"type": "web_search"}), false, false),
            (json!({"type": "web_search_preview"}), false, false),
            (json!({"type": "web_search", "external_web_access": false}), false, true),
            (json!({"type": "web_search_2025_08_26", "external_web_access": false}), false, true),
            (json!({"type": "web_search_preview", "external_web_access": false}), false, false),
            (
                json!({"type": "web_search_preview_2025_03_11", "external_web_access": false}),
                false,
                false,
            ),
            (json!({"type": "code_interpreter", "container": {"type": "auto"}}), false, true),
            (
                json!({"type": "code_interpreter", "container": {"type": "auto", "network_policy": network}}),
                false,
                false,
            ),
            (json!({"type": "shell", "environment": {"type": "container_auto"}}), false, false),
            (json!({"type": "mcp", "connector_id": "connector_dropbox"}), false, false),
            (json!({"type": "file_search", "vector_store_ids": ["v"]}), false, true),
            (
                json!({"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}),
                false,
                false,
            ),
            (json!({"type": "novel_tool"}), false, false),
            (json!({"type": "computer_use_preview"}), true, true),
        ] {
            for request in [
                json!({"tools": [tool]}),
                json!({"input": [{"type": "additional_tools", "tools": [tool]}]}),
            ] {
                assert_eq!(
                    refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_none(),
                    none,
                    "{request}"
                );
                assert_eq!(refused(&request, &trusted()).is_none(), some, "{request}");
            }
        }
    }

    #[test]
    fn searching_models_and_background_are_refused() {
        for request in [
            json!({"model": "gpt-4o-search-preview"}),
            json!({"model": "o3-deep-research"}),
            json!({"model": "org/m:online"}),
            json!({"model": "org/m:free:Online"}),
            json!({"models": ["m", "org/m:online"]}),
            json!({"model": "m", "web_search_options": {}}),
            json!({"model": "m", "search_parameters": {"mode": "auto"}}),
            json!({"model": "m", "plugins": [{"id": "web"}]}),
            json!({"model": "m", "plugins": {"id": "web"}}),
            json!({"model": "m", "background": true}),
        ] {
            for policy in [ResolvedPolicy::of(NetworkPolicy::None, &[]), trusted()] {
                assert!(refused(&request, &policy).is_some(), "{request}");
            }
        }
        for request in
            [json!({"prompt": {"id": "pmpt_1"}}), json!({"plugins": [{"id": "file-parser"}]})]
        {
            assert!(
                refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some(),
                "{request}"
            );
            assert_eq!(refused(&request, &trusted()), None, "{request}");
        }
        let plain = json!({"model": "org/online:free", "models": ["m:nitro"], "plugins": []});
        assert_eq!(refused(&plain, &ResolvedPolicy::of(NetworkPolicy::None, &[])), None);
    }

    #[test]
    fn ambiguous_request_is_refused() {
        for body in [
            "not json",
            "[]",
            r#"{"tools":[],"tools":[{"type":"web_search"}]}"#,
            r#"{"tools":{"0":{"type":"web_search"}}}"#,
            r#"{"tools":[{"type":"function","type":"web_search"}]}"#,
            r#"{"tools":[{"type":["web_search"]}]}"#,
            r#"{"messages":[{"content":[{"image_url":"data:a","image_url":"https://evil.example"}]}]}"#,
        ] {
            assert!(check(body.as_bytes(), &trusted()).is_err(), "{body}");
        }
    }
}
