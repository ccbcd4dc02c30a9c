//! What a path at the model door asks for. Pure.

use harvest_proto::{UpstreamKind, UpstreamName};
use hyper::Method;

/// What is asked of which upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) upstream: UpstreamName,
    pub(super) endpoint: Endpoint,
    /// Path and query after the version, as sent by the agent; Gemini's query is the gateway's own.
    pub(super) target: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Messages,
    CountTokens,
    Responses,
    Chat,
    Models,
    /// `generateContent` and `streamGenerateContent`.
    Gemini,
    GeminiCount,
    GeminiModels,
}

const STREAM: &str = "streamGenerateContent";

impl Route {
    /// Parses `[/UPSTREAM]/v1/…` and `[/UPSTREAM]/v1beta/…`; `None` for a path that is not
    /// supported.
    pub(super) fn parse(
        method: &Method,
        path: &str,
        query: Option<&str>,
        default: &UpstreamName,
    ) -> Option<Self> {
        let (first, _) = path.strip_prefix('/')?.split_once('/')?;
        let (upstream, path) = match first {
            "v1" | "v1beta" => (default.clone(), path),
            name => (name.parse().ok()?, path.strip_prefix('/')?.strip_prefix(name)?),
        };
        if let Some(target) = path.strip_prefix("/v1beta/") {
            let (endpoint, target) = gemini(method, target, query)?;
            return Some(Self { upstream, endpoint, target });
        }
        let target = path.strip_prefix("/v1")?;
        let endpoint = match (method, target) {
            (&Method::POST, "/messages") => Endpoint::Messages,
            (&Method::POST, "/messages/count_tokens") => Endpoint::CountTokens,
            (&Method::POST, "/responses") => Endpoint::Responses,
            (&Method::POST, "/chat/completions") => Endpoint::Chat,
            (&Method::GET, "/models") => Endpoint::Models,
            (&Method::GET, one) if is_one_model(one) => Endpoint::Models,
            _ => return None,
        };
        let target = query.map_or_else(|| target.to_owned(), |query| format!("{target}?{query}"));
        Some(Self { upstream, endpoint, target })
    }

    /// The model that Gemini's path names.
    pub(super) fn model(&self) -> Option<&str> {
        let path = self.target.split('?').next().unwrap_or_default();
        let named = path.strip_prefix("/models/").filter(|_| self.endpoint.is_gemini())?;
        Some(named.rsplit_once(':').map_or(named, |(model, _)| model))
    }

    /// Whether Gemini's path asks for a stream.
    pub(super) fn streams(&self) -> bool {
        self.target.split('?').next().unwrap_or_default().ends_with(&format!(":{STREAM}"))
    }
}

/// The endpoint of a path after `/v1beta/`, and the target. The agent's query could contain a key,
/// and ask for a form or for fields of the response from which tokens cannot be counted.
fn gemini(method: &Method, path: &str, query: Option<&str>) -> Option<(Endpoint, String)> {
    let target = format!("/{path}");
    let (model, action) = match path.rsplit_once(':') {
        Some((model, action)) => (format!("/{model}"), action),
        None => (target.clone(), ""),
    };
    let endpoint = match (method, action) {
        (&Method::GET, "") if path == "models" => Endpoint::GeminiModels,
        // A further segment would be another resource of the service, such as `operations`.
        _ if !is_one_model(&model) || model.matches('/').count() > 2 => return None,
        (&Method::GET, "") => Endpoint::GeminiModels,
        (&Method::POST, "generateContent" | STREAM) => Endpoint::Gemini,
        (&Method::POST, "countTokens") => Endpoint::GeminiCount,
        _ => return None,
    };
    let query = match (endpoint, action) {
        (Endpoint::GeminiModels, _) => pages(query),
        (_, STREAM) => "alt=sse".to_owned(),
        _ => String::new(),
    };
    let query = if query.is_empty() { query } else { format!("?{query}") };
    Some((endpoint, target + &query))
}

/// Of a query, which page of a list it asks for.
fn pages(query: Option<&str>) -> String {
    let is_page = |pair: &&str| pair.starts_with("pageSize=") || pair.starts_with("pageToken=");
    let pages = query.into_iter().flat_map(|all| all.split('&')).filter(is_page);
    pages.collect::<Vec<_>>().join("&")
}

// An id that URL parsers read as it is: dot segments, also encoded ones, would lead to other paths
// of the service, with its key.
fn is_one_model(target: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@-".contains(&byte);
    target.strip_prefix("/models/").is_some_and(|id| {
        id.split('/').all(|part| !matches!(part, "" | "." | "..") && part.bytes().all(plain))
    })
}

impl Endpoint {
    pub(super) const fn is_served_by(self, kind: UpstreamKind) -> bool {
        use UpstreamKind::{Anthropic, Gemini, Openai, OpenaiChat, Scripted};
        match self {
            Self::Messages | Self::CountTokens => matches!(kind, Anthropic | Scripted),
            Self::Responses => matches!(kind, Openai | Scripted),
            Self::Chat => matches!(kind, Openai | OpenaiChat | Scripted),
            Self::Models => !matches!(kind, Gemini),
            Self::Gemini | Self::GeminiCount | Self::GeminiModels => {
                matches!(kind, Gemini | Scripted)
            }
        }
    }

    /// Whether the request asks for models: it has no body and costs nothing.
    pub(super) const fn is_catalog(self) -> bool {
        matches!(self, Self::Models | Self::GeminiModels)
    }

    const fn is_gemini(self) -> bool {
        matches!(self, Self::Gemini | Self::GeminiCount | Self::GeminiModels)
    }

    /// Whether a call uses tokens.
    pub(super) const fn uses_tokens(self) -> bool {
        matches!(self, Self::Messages | Self::Responses | Self::Chat | Self::Gemini)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(path: &str) -> Option<(String, Endpoint, String)> {
        let default = UpstreamName::anthropic();
        let route = Route::parse(&Method::POST, path, Some("beta=true"), &default)?;
        Some((route.upstream.to_string(), route.endpoint, route.target))
    }

    #[test]
    fn first_part_of_path_names_the_upstream() {
        for (path, upstream) in [("/v1/messages", "anthropic"), ("/my-own/v1/messages", "my-own")] {
            let target = "/messages?beta=true".to_owned();
            assert_eq!(parse(path), Some((upstream.to_owned(), Endpoint::Messages, target)));
        }
        for path in [
            "/",
            "/v1",
            "/v1/",
            "/v1/v1/messages",
            "/a/b/v1/messages",
            "/messages",
            "",
            "//v1/messages",
            "/A/v1/messages",
        ] {
            assert_eq!(parse(path), None, "{path}");
        }
        let default = UpstreamName::anthropic();
        assert_eq!(Route::parse(&Method::GET, "/v1/messages", None, &default), None);
        let models = Route::parse(&Method::GET, "/openai/v1/models/gpt", None, &default).unwrap();
        assert_eq!((models.endpoint, models.target.as_str()), (Endpoint::Models, "/models/gpt"));
    }

    #[test]
    fn gemini_path_names_model_and_method() {
        let default: UpstreamName = "gemini".parse().unwrap();
        let parse = |method, path: &str, query| Route::parse(method, path, query, &default);
        let path = "/own/v1beta/models/gemini-2.5-pro:streamGenerateContent";
        let route = parse(&Method::POST, path, Some("key=none&alt=sse")).unwrap();
        assert_eq!((route.upstream.as_str(), route.endpoint), ("own", Endpoint::Gemini));
        assert_eq!(route.target, "/models/gemini-2.5-pro:streamGenerateContent?alt=sse");
        assert_eq!((route.model(), route.streams()), (Some("gemini-2.5-pro"), true));
        let count = parse(&Method::POST, "/v1beta/models/m:countTokens", None).unwrap();
        assert_eq!((count.endpoint, count.streams()), (Endpoint::GeminiCount, false));
        let list = parse(&Method::GET, "/v1beta/models", Some("pageSize=5")).unwrap();
        assert_eq!((list.endpoint, &*list.target), (Endpoint::GeminiModels, "/models?pageSize=5"));
        for path in [
            "/v1beta/models/m:batchGenerateContent",
            "/v1beta/models/../files:generateContent",
            "/v1beta/files",
            "/v1beta/models/:generateContent",
            "/v1beta/",
        ] {
            assert_eq!(parse(&Method::POST, path, None), None, "{path}");
        }
    }

    #[test]
    fn only_models_of_gemini_are_reached() {
        let default = UpstreamName::openai();
        for rest in ["/operations", "/operations/1", "/operations/1:generateContent", ""] {
            for method in [Method::GET, Method::POST] {
                let path = format!("/v1beta/models/m{rest}");
                let route = Route::parse(&method, &path, None, &default);
                let model = method == Method::GET && rest.is_empty();
                assert_eq!(route.is_some(), model, "{method} {path}");
            }
        }
    }

    #[test]
    fn gemini_query_cannot_hide_token_counts() {
        for query in [None, Some("alt=proto"), Some("alt=sse&alt=json&fields=candidates")] {
            for (method, expected) in [(STREAM, "?alt=sse"), ("generateContent", "")] {
                let path = format!("/v1beta/models/m:{method}");
                let route =
                    Route::parse(&Method::POST, &path, query, &UpstreamName::openai()).unwrap();
                assert_eq!(route.target, format!("/models/m:{method}{expected}"), "{query:?}");
            }
        }
    }

    fn model_path(path: &str) -> Option<String> {
        let default = UpstreamName::openai();
        Route::parse(&Method::GET, path, None, &default).map(|route| route.target)
    }

    #[test]
    fn model_id_leads_to_no_other_path() {
        for id in ["gpt-5.2", "ft:gpt:org::a1", "meta/llama-3.1", "@cf/m", "...", "a..b"] {
            assert_eq!(model_path(&format!("/v1/models/{id}")), Some(format!("/models/{id}")));
        }
        for id in [
            "",
            ".",
            "..",
            "../files",
            "a/../../files",
            "%2e%2e/files",
            ".%2E/files",
            "a/./b",
            "a//b",
            "a/",
            "..\\files",
            "a%2fb",
            "a;b",
        ] {
            assert_eq!(model_path(&format!("/v1/models/{id}")), None, "{id}");
        }
    }

    proptest! {
        #[test]
        fn accepted_model_path_survives_url_parsing(id in "[a.%2eE/\\\\:@;?#-]{0,12}") {
            if let Some(target) = model_path(&format!("/v1/models/{id}")) {
                let url = reqwest::Url::parse(&format!("https://example.org/v1{target}")).unwrap();
                prop_assert_eq!(url.path(), format!("/v1/models/{id}"));
            }
        }
    }
}
