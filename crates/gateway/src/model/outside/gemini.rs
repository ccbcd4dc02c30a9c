//! What a request of the Gemini API asks the service to reach by itself. The API accepts the names
//! of fields in two spellings; a field that is given twice is refused.

use std::collections::BTreeMap;

use serde::{Deserialize, de::IgnoredAny};

use super::{OutsideError, check_url};
use harvest_proto::NetworkPolicy;

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

pub(super) fn check(body: &[u8], policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let request: Request = serde_json::from_slice(body)
        .map_err(|error| OutsideError::Malformed(format!("the request is malformed: {error}")))?;
    check_request(&request, policy)
}

fn check_request(request: &Request, policy: &ResolvedPolicy) -> Result<(), OutsideError> {
    let contents = request.contents.iter().flatten().chain(&request.system_instruction);
    check_parts(contents.flat_map(|content| content.parts.iter().flatten()), policy)?;
    let mut tools = request.tools.iter().flatten().flat_map(BTreeMap::keys);
    if let Some(tool) = tools.find(|tool| !allows_tool(tool, policy)) {
        return Err(OutsideError::NotAllowed(tool.clone()));
    }
    request.generate_content_request.iter().try_for_each(|inner| check_request(inner, policy))
}

fn check_parts<'a>(
    parts: impl Iterator<Item = &'a Part>,
    policy: &ResolvedPolicy,
) -> Result<(), OutsideError> {
    for part in parts {
        if let Some(FileData { file_uri: Some(uri) }) = &part.file_data {
            check_url(uri, policy)?;
        }
        let nested = part.function_response.iter().flat_map(|inner| inner.parts.iter().flatten());
        for FunctionPart { file_data } in nested {
            if let Some(FileData { file_uri: Some(uri) }) = file_data {
                check_url(uri, policy)?;
            }
        }
    }
    Ok(())
}

fn allows_tool(tool: &str, policy: &ResolvedPolicy) -> bool {
    let tool = tool.replace('_', "").to_ascii_lowercase();
    let searches = policy.base != NetworkPolicy::None && SEARCHES.contains(&&*tool);
    tool == FUNCTIONS || searches
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    contents: Option<Vec<Content>>,
    #[serde(alias = "system_instruction")]
    system_instruction: Option<Content>,
    tools: Option<Vec<BTreeMap<String, IgnoredAny>>>,
    /// In requests that count tokens.
    #[serde(alias = "generate_content_request")]
    generate_content_request: Option<Box<Request>>,
}

#[derive(Deserialize)]
struct Content {
    parts: Option<Vec<Part>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    #[serde(alias = "file_data")]
    file_data: Option<FileData>,
    #[serde(alias = "function_response")]
    function_response: Option<FunctionResponse>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileData {
    #[serde(alias = "file_uri")]
    file_uri: Option<String>,
}

#[derive(Deserialize)]
struct FunctionResponse {
    parts: Option<Vec<FunctionPart>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FunctionPart {
    #[serde(alias = "file_data")]
    file_data: Option<FileData>,
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
        let spelt = r#"{"contents":[{"parts":[{"fileData":{},"file_data":{}}]}]}"#;
        assert!(check(spelt.as_bytes(), &trusted()).is_err());
    }
}
