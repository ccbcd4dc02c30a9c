//! Upstreams, which serve model calls, and references to their models.

use crate::text::{MAX_PLAIN_NAME, checked_text, is_plain_name, quoted, word_enum};

/// Maximum length of a model reference.
pub const MAX_MODEL_REF: usize = 200;

const SCRIPTED: &str = "scripted";

/// The upstreams that need no configuration.
pub const BUILT_IN_UPSTREAMS: [(&str, UpstreamKind); 4] = [
    ("anthropic", UpstreamKind::Anthropic),
    ("openai", UpstreamKind::Openai),
    (SCRIPTED, UpstreamKind::Scripted),
    ("gemini", UpstreamKind::Gemini),
];

word_enum!(
    /// The protocols that an upstream speaks.
    UpstreamKind, "kind of upstream" {
        /// Anthropic Messages.
        Anthropic = "anthropic",
        /// OpenAI Responses and Chat Completions.
        Openai = "openai",
        /// OpenAI Chat Completions only, as most compatible servers.
        OpenaiChat = "openai_chat",
        /// Google Gemini.
        Gemini = "gemini",
        /// All of these: the scripted model, which plays the script in a prompt. No key, no cost.
        Scripted = "scripted",
    }
);

impl UpstreamKind {
    /// Name of the secret with a token of a subscription, which serves instead of an API key.
    #[must_use]
    pub const fn subscription_secret(self) -> Option<&'static str> {
        match self {
            Self::Anthropic => Some("CLAUDE_CODE_OAUTH_TOKEN"),
            Self::Openai | Self::OpenaiChat | Self::Gemini | Self::Scripted => None,
        }
    }
}

checked_text!(
    /// Name of an upstream: a service for model calls, built in or configured.
    UpstreamName, InvalidUpstreamName, check_upstream
);

/// The text is not the name of an upstream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid upstream `{0}`: use 1 to {MAX_PLAIN_NAME} small letters, digits and `-`, and not \
     `v1` or `v1beta`"
)]
pub struct InvalidUpstreamName(String);

impl UpstreamName {
    /// The Anthropic API.
    #[must_use]
    pub fn anthropic() -> Self {
        Self("anthropic".to_owned())
    }

    /// The OpenAI API.
    #[must_use]
    pub fn openai() -> Self {
        Self("openai".to_owned())
    }

    /// The scripted model.
    #[must_use]
    pub fn scripted() -> Self {
        Self(SCRIPTED.to_owned())
    }
}

fn check_upstream(name: &str) -> Result<(), InvalidUpstreamName> {
    // The first part of a path at the model door is an upstream or one of these.
    let valid = is_plain_name(name) && !["v1", "v1beta"].contains(&name);
    valid.then_some(()).ok_or_else(|| InvalidUpstreamName(quoted(name)))
}

checked_text!(
    /// A model: `NAME` or `UPSTREAM/NAME`. `NAME` alone is a model of the agent's usual upstream,
    /// but `scripted` is the scripted model.
    ModelRef, InvalidModelRef, check_model
);

/// The text is not a model reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid model `{0}`: use NAME, UPSTREAM/NAME or `scripted`, without spaces, at most \
     {MAX_MODEL_REF} characters"
)]
pub struct InvalidModelRef(String);

impl ModelRef {
    /// The scripted model.
    #[must_use]
    pub fn scripted() -> Self {
        Self(SCRIPTED.to_owned())
    }

    /// The upstream that serves the model; none for `NAME` alone.
    #[must_use]
    pub fn upstream(&self) -> Option<UpstreamName> {
        split_model(self).and_then(|(upstream, _)| upstream)
    }

    /// The model's name at its upstream; none for the scripted model, which has no name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        split_model(self).and_then(|(_, name)| name)
    }
}

fn check_model(text: &str) -> Result<(), InvalidModelRef> {
    let valid = text.len() <= MAX_MODEL_REF && split_model(text).is_some();
    valid.then_some(()).ok_or_else(|| InvalidModelRef(quoted(text)))
}

fn split_model(text: &str) -> Option<(Option<UpstreamName>, Option<&str>)> {
    // The name may contain `/` itself: compatible servers name models `OWNER/NAME`.
    let (upstream, name) = match text.split_once('/') {
        Some((upstream, name)) => (Some(upstream.parse().ok()?), name),
        None if text == SCRIPTED => return Some((Some(UpstreamName::scripted()), None)),
        None => (None, text),
    };
    // The name becomes an argument of the agent.
    let valid = !name.starts_with('-')
        && name.split('/').all(|part| !part.is_empty())
        && name.bytes().all(|byte| byte.is_ascii_graphic());
    valid.then_some((upstream, Some(name)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::tests::round_trip;

    proptest! {
        #[test]
        fn models_round_trip(upstream in "([a-z][a-z0-9]{2,8}/)?", name in "[a-z0-9][a-z0-9.:_-]{0,80}(/[a-z]{1,9})?") {
            prop_assume!(!upstream.is_empty() || (name != SCRIPTED && !name.contains('/')));
            let model = round_trip::<ModelRef>(&format!("{upstream}{name}"));
            prop_assert_eq!(model.name(), Some(name.as_str()));
            let expected = upstream.strip_suffix('/').map(|name| name.parse().unwrap());
            prop_assert_eq!(model.upstream(), expected);
        }

        #[test]
        fn invalid_upstream_names_are_refused(name in "[A-Z_/. ]|[a-z]{33}|-[a-z]|v1|v1beta|[a-z][äλ]") {
            prop_assert!(name.parse::<UpstreamName>().is_err());
            let model = format!("{name}/model");
            prop_assert!(model.parse::<ModelRef>().is_err());
        }
    }

    #[test]
    fn scripted_model_has_no_name() {
        let model = round_trip::<ModelRef>("scripted");
        assert_eq!((model.upstream(), model.name()), (Some(UpstreamName::scripted()), None));
        for bad in ["", "/", "anthropic/", "a b", "-x", "anthropic/a//b", "anthropic/a/"] {
            assert!(bad.parse::<ModelRef>().is_err(), "{bad}");
        }
    }

    #[test]
    fn built_in_upstreams_have_valid_names() {
        for (name, _) in BUILT_IN_UPSTREAMS {
            round_trip::<UpstreamName>(name);
        }
    }
}
