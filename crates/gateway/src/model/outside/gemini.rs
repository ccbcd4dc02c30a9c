//! The same for requests of the Gemini API. The API accepts the names of fields in two spellings,
//! and an object where it expects a list; each spelling is judged.
//!
//! | in the request | `none` | `trusted` |
//! |---|---|---|
//! | `fileUri` | refused | the host must be allowed |
//! | `urlContext`, unknown tools | refused | refused: they reach hosts of the session's choice |
//! | `googleSearch` and other tools of the service, `cachedContent` | refused | allowed |
//! | functions that run in the sandbox | allowed | allowed |

use harvest_proto::NetworkPolicy;

use super::{OutsideError, check_url, node::Node};
use crate::ledger::ResolvedPolicy;

/// Tools that reach no host of the session's choice. `urlContext` fetches any URL.
const SEARCHES: [&str; 6] = [
    "googlesearch",
    "googlesearchretrieval",
    "googlemaps",
    "codeexecution",
    "computeruse",
    "filesearch",
];

/// Functions that the agent runs itself.
const FUNCTIONS: &str = "functiondeclarations";

/// Checks a request.
pub(super) fn check(body: &[u8], policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    check_request(&Node::fields(body)?, policy)
}

fn check_request(fields: &[(String, Node)], policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    fields.iter().try_for_each(|(name, value)| match (plain(name).as_str(), value) {
        (_, Node::Null) => Ok(()),
        ("tools", Node::List(tools)) => tools.iter().try_for_each(|tool| check_tools(tool, policy)),
        ("tools", tool) => check_tools(tool, policy),
        // Content stored at the service may come with tools of its own.
        ("cachedcontent", _) if policy.base == NetworkPolicy::None => {
            Err(OutsideError::NotAllowed("cached content".to_owned()))
        }
        // In requests that count tokens.
        ("generatecontentrequest", Node::Object(inner)) => check_request(inner, policy),
        ("generatecontentrequest", _) => {
            Err(OutsideError::Malformed(format!("`{name}` is not an object")))
        }
        (_, value) => check_files(value, policy),
    })
}

/// Checks the tools of an object: each field is one.
fn check_tools(tools: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let Node::Object(tools) = tools else {
        return Err(OutsideError::Malformed("a tool is not an object".to_owned()));
    };
    match tools.iter().find(|(name, _)| !allows_tool(name, policy)) {
        Some((name, _)) => Err(OutsideError::NotAllowed(format!("tool `{name}`"))),
        None => Ok(()),
    }
}

/// Checks every file that the service would fetch, at any depth. Arguments and results of
/// functions are the agent's data.
fn check_files(node: &Node, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let fields = match node {
        Node::List(items) => return items.iter().try_for_each(|item| check_files(item, policy)),
        Node::Object(fields) => fields,
        Node::Null | Node::Bool(_) | Node::Number | Node::Text(_) => return Ok(()),
    };
    fields.iter().try_for_each(|(name, value)| match (plain(name).as_str(), value) {
        ("fileuri", Node::Text(url)) => check_url(url, policy),
        ("args" | "response", _) => Ok(()),
        (_, value) => check_files(value, policy),
    })
}

fn allows_tool(name: &str, policy: &ResolvedPolicy) -> bool {
    let name = plain(name);
    let searches = policy.base != NetworkPolicy::None && SEARCHES.contains(&&*name);
    name == FUNCTIONS || searches
}

/// A name as it is in all spellings.
fn plain(name: &str) -> String {
    name.replace('_', "").to_ascii_lowercase()
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

    #[test]
    fn gemini_files_need_an_allowed_host() {
        let file = |url: &str| json!({"fileData": {"fileUri": url, "mimeType": "image/png"}});
        let evil = file("https://evil.example/a.png");
        let snake = json!({"file_data": {"file_uri": "https://evil.example/a.png"}});
        let nested = json!({"functionResponse": {"name": "f", "response": {}, "parts": [evil]}});
        for part in [evil, snake, nested] {
            let contents = json!([{"role": "user", "parts": [{"text": "a"}, part]}]);
            for request in [
                json!({ "contents": contents }),
                json!({"generateContentRequest": {"contents": contents}}),
                json!({"systemInstruction": {"parts": [part]}}),
                json!({"system_instruction": {"parts": [part]}}),
            ] {
                let name = refused(&request, &trusted());
                assert_eq!(name.as_deref(), Some("evil.example"), "{request}");
            }
        }
        let good = json!({"contents": [{"parts": [file("https://files.example.org/a.png")]}]});
        assert_eq!(refused(&good, &trusted()), None);
        assert!(refused(&good, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some());
    }

    #[test]
    fn gemini_tools_are_refused_by_policy() {
        for (tool, none, some) in [
            ("functionDeclarations", true, true),
            ("function_declarations", true, true),
            ("googleSearch", false, true),
            ("code_execution", false, true),
            ("urlContext", false, false),
            ("url_context", false, false),
            ("novelTool", false, false),
        ] {
            let request = json!({"contents": [], "tools": [{tool: {}}]});
            assert_eq!(
                refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_none(),
                none,
                "{tool}"
            );
            assert_eq!(refused(&request, &trusted()).is_none(), some, "{tool}");
        }
        let twice = r#"{"tools":[],"tools":[{"urlContext":{}}]}"#;
        assert!(check(twice.as_bytes(), &trusted()).is_err());
    }

    #[test]
    fn each_form_of_gemini_request_is_judged() {
        let file = json!({"fileUri": "https://evil.example/a.png"});
        for (request, evil) in [
            (json!({"contents": {"parts": {"fileData": file}}}), true),
            (json!({"contents": [{"parts": [{"fileData": {}, "file_data": file}]}]}), true),
            (json!({"contents": [[[{"parts": [{"fileData": [file]}]}]]]}), true),
            (json!({"contents": [], "tools": {"urlContext": {}}}), true),
            (json!({"contents": [], "tools": [[{"urlContext": {}}]]}), true),
            (json!({"generate_content_request": [{"tools": [{"urlContext": {}}]}]}), true),
            (json!([[{"parts": [{"fileData": file}]}]]), true),
            (json!({"contents": {"parts": {"text": "a"}}, "tools": null}), false),
            (json!({"contents": {"parts": {"functionCall": {"name": "f", "args": file}}}}), false),
            (json!({"contents": [{"parts": [{"functionResponse": {"response": file}}]}]}), false),
            (json!({"contents": [], "tools": {"functionDeclarations": [file]}}), false),
        ] {
            assert_eq!(refused(&request, &trusted()).is_some(), evil, "{request}");
        }
    }

    #[test]
    fn cached_content_of_gemini_needs_a_network() {
        for name in ["cachedContent", "cached_content"] {
            let request = json!({"contents": [], name: "cachedContents/a"});
            for request in [request.clone(), json!({ "generateContentRequest": request })] {
                assert!(
                    refused(&request, &ResolvedPolicy::of(NetworkPolicy::None, &[])).is_some(),
                    "{request}"
                );
                assert_eq!(refused(&request, &trusted()), None, "{request}");
            }
        }
    }
}
