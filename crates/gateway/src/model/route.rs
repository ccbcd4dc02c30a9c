//! What a path at the model door asks for. Pure.

use harvest_proto::{UpstreamKind, UpstreamName};
use hyper::Method;

/// What is asked of which upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) upstream: UpstreamName,
    pub(super) endpoint: Endpoint,
    /// Path and query after `/v1`, as sent by the agent.
    pub(super) target: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Messages,
    CountTokens,
    Responses,
    Chat,
    Models,
}

impl Route {
    /// Parses `[/UPSTREAM]/v1/…`; `None` for a path that is not supported.
    pub(super) fn parse(
        method: &Method,
        path: &str,
        query: Option<&str>,
        default: &UpstreamName,
    ) -> Option<Self> {
        let (first, _) = path.strip_prefix('/')?.split_once('/')?;
        let (upstream, path) = match first {
            "v1" => (default.clone(), path),
            name => (name.parse().ok()?, path.strip_prefix('/')?.strip_prefix(name)?),
        };
        let target = path.strip_prefix("/v1")?;
        let endpoint = match (method, target) {
            (&Method::POST, "/messages") => Endpoint::Messages,
            (&Method::POST, "/messages/count_tokens") => Endpoint::CountTokens,
            (&Method::POST, "/responses") => Endpoint::Responses,
            (&Method::POST, "/chat/completions") => Endpoint::Chat,
            (&Method::GET, "/models") => Endpoint::Models,
            (&Method::GET, one) if one.starts_with("/models/") => Endpoint::Models,
            _ => return None,
        };
        let target = query.map_or_else(|| target.to_owned(), |query| format!("{target}?{query}"));
        Some(Self { upstream, endpoint, target })
    }
}

impl Endpoint {
    pub(super) const fn is_served_by(self, kind: UpstreamKind) -> bool {
        use UpstreamKind::{Anthropic, Openai, OpenaiChat, Scripted};
        match self {
            Self::Messages | Self::CountTokens => matches!(kind, Anthropic | Scripted),
            Self::Responses => matches!(kind, Openai | Scripted),
            Self::Chat => matches!(kind, Openai | OpenaiChat | Scripted),
            Self::Models => true,
        }
    }

    /// Whether a call uses tokens.
    pub(super) const fn uses_tokens(self) -> bool {
        matches!(self, Self::Messages | Self::Responses | Self::Chat)
    }
}

#[cfg(test)]
mod tests {
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
}
