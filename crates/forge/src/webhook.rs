//! Webhooks in GitHub's form: signs them, checks their signatures, and reads what they tell. A
//! payload is read only after its signature was found correct.

use std::fmt::Write as _;

use harvest_proto::{BranchName, Secret};
use ring::hmac;
use serde::Deserialize;

const PREFIX: &str = "sha256=";
const MAX_ID_BYTES: usize = 100;

/// Events whose payload is kept for later use: they tell of checks and reviews.
const KEPT: &[&str] = &[
    "check_run",
    "check_suite",
    "pull_request_review",
    "pull_request_review_comment",
    "pull_request_review_thread",
    "status",
    "workflow_job",
    "workflow_run",
];

/// The headers of a delivery.
#[derive(Debug, Clone, Copy, Default)]
pub struct WebhookHeaders<'a> {
    /// `X-Hub-Signature-256`.
    pub signature: Option<&'a str>,
    /// `X-GitHub-Event`.
    pub event: Option<&'a str>,
    /// `X-GitHub-Delivery`.
    pub delivery: Option<&'a str>,
}

/// A webhook with a correct signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Webhook {
    /// The sender's id of the delivery.
    pub delivery: String,
    pub event: String,
    /// Empty when the event has none.
    pub action: String,
    /// URL of the repository's git remote.
    pub repository: Option<String>,
    pub news: WebhookNews,
}

/// What a webhook tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WebhookNews {
    /// A branch was moved; `None` for other references.
    Push { branch: Option<BranchName>, is_default: bool },
    /// A pull request changed.
    PullRequest { number: u64 },
    /// A check or review, to be kept.
    Kept,
    /// Nothing that is used.
    Other,
}

/// Why a webhook is refused. No message quotes the signature or the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    #[error("webhooks are not set up")]
    NotSetUp,
    #[error("the webhook has no signature")]
    NoSignature,
    #[error("the signature does not fit the body")]
    WrongSignature,
    #[error("the webhook has no valid `X-GitHub-Event` and `X-GitHub-Delivery`")]
    NoEvent,
    #[error("the body is not the JSON of a webhook")]
    NoPayload,
}

/// The value of `X-Hub-Signature-256`.
#[must_use]
pub fn sign_webhook(secret: &Secret<String>, body: &[u8]) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
    let mut text = PREFIX.to_owned();
    for byte in hmac::sign(&key, body).as_ref() {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn is_signed(secret: &Secret<String>, signature: &str, body: &[u8]) -> bool {
    let Some(hex) = signature.strip_prefix(PREFIX).filter(|hex| hex.len() == 64) else {
        return false;
    };
    let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    let Some(tag) = (0..64).step_by(2).map(byte).collect::<Option<Vec<u8>>>() else { return false };
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.expose().as_bytes());
    // Compares in constant time.
    hmac::verify(&key, body, &tag).is_ok()
}

#[derive(Debug, Deserialize)]
struct Payload {
    #[serde(default)]
    action: String,
    repository: Option<PayloadRepository>,
    r#ref: Option<String>,
    number: Option<u64>,
    pull_request: Option<Numbered>,
}

#[derive(Debug, Deserialize)]
struct PayloadRepository {
    clone_url: Option<String>,
    default_branch: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Numbered {
    number: u64,
}

/// Reads a delivery.
///
/// # Errors
/// When the signature is not that of the body, or the body is not a webhook's.
pub fn read_webhook(
    secret: &Secret<String>,
    headers: WebhookHeaders<'_>,
    body: &[u8],
) -> Result<Webhook, WebhookError> {
    let signature = headers.signature.ok_or(WebhookError::NoSignature)?;
    if !is_signed(secret, signature, body) {
        return Err(WebhookError::WrongSignature);
    }
    let event = headers.event.filter(|event| is_word(event)).ok_or(WebhookError::NoEvent)?;
    let delivery = headers.delivery.filter(|id| is_word(id)).ok_or(WebhookError::NoEvent)?;
    let payload: Payload = serde_json::from_slice(body).map_err(|_| WebhookError::NoPayload)?;
    let default = payload.repository.as_ref().and_then(|one| one.default_branch.as_deref());
    let news = match event {
        "push" => {
            let branch = payload.r#ref.as_deref().and_then(|name| name.strip_prefix("refs/heads/"));
            let is_default = branch.is_some() && branch == default;
            WebhookNews::Push { branch: branch.and_then(|name| name.parse().ok()), is_default }
        }
        "pull_request" => match payload.pull_request.map(|pull| pull.number).or(payload.number) {
            Some(number) => WebhookNews::PullRequest { number },
            None => return Err(WebhookError::NoPayload),
        },
        event if KEPT.contains(&event) => WebhookNews::Kept,
        _ => WebhookNews::Other,
    };
    Ok(Webhook {
        delivery: delivery.to_owned(),
        event: event.to_owned(),
        action: payload.action,
        repository: payload.repository.and_then(|one| one.clone_url),
        news,
    })
}

fn is_word(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    !text.is_empty() && text.len() <= MAX_ID_BYTES && text.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret() -> Secret<String> {
        Secret::new("It's a Secret to Everybody".to_owned())
    }

    fn read(event: &str, body: &str) -> Result<Webhook, WebhookError> {
        let signature = sign_webhook(&secret(), body.as_bytes());
        let headers = WebhookHeaders {
            signature: Some(&signature),
            event: Some(event),
            delivery: Some("72d3162e-cc78-11e3-81ab-4c9367dc0958"),
        };
        read_webhook(&secret(), headers, body.as_bytes())
    }

    #[test]
    fn signature_is_that_of_githubs_documentation() {
        let expected = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        assert_eq!(sign_webhook(&secret(), b"Hello, World!"), expected);
    }

    #[test]
    fn body_is_not_read_before_its_signature() {
        let body = b"{ not json";
        for signature in [None, Some(""), Some("sha256="), Some("sha1=ab"), Some("sha256=é")] {
            let headers = WebhookHeaders { signature, ..WebhookHeaders::default() };
            let refused = read_webhook(&secret(), headers, body).unwrap_err();
            let expected = match signature {
                None => WebhookError::NoSignature,
                Some(_) => WebhookError::WrongSignature,
            };
            assert_eq!(refused, expected);
        }
        assert_eq!(read("push", "{ not json"), Err(WebhookError::NoPayload));
        assert_eq!(read("a b", "{}"), Err(WebhookError::NoEvent));
    }

    #[test]
    fn news_are_pushes_pull_requests_and_checks() {
        let repository =
            r#""repository":{"clone_url":"https://h/a/b.git","default_branch":"main"}"#;
        let push = read("push", &format!(r#"{{"ref":"refs/heads/main",{repository}}}"#)).unwrap();
        let branch = Some("main".parse().unwrap());
        assert_eq!(push.news, WebhookNews::Push { branch, is_default: true });
        assert_eq!(push.repository.as_deref(), Some("https://h/a/b.git"));
        let tag = read("push", r#"{"ref":"refs/tags/v1"}"#).unwrap();
        assert_eq!(tag.news, WebhookNews::Push { branch: None, is_default: false });
        let pull = read("pull_request", r#"{"action":"closed","pull_request":{"number":7}}"#);
        let pull = pull.unwrap();
        assert_eq!(
            (pull.action.as_str(), pull.news),
            ("closed", WebhookNews::PullRequest { number: 7 })
        );
        assert_eq!(read("pull_request", "{}"), Err(WebhookError::NoPayload));
        assert_eq!(read("check_run", "{}").unwrap().news, WebhookNews::Kept);
        assert_eq!(read("sponsorship", "{}").unwrap().news, WebhookNews::Other);
    }

    proptest! {
        #[test]
        fn changed_body_does_not_fit_signature(body: Vec<u8>, at: usize, bit in 0u8..8) {
            prop_assume!(!body.is_empty());
            let signature = sign_webhook(&secret(), &body);
            prop_assert!(is_signed(&secret(), &signature, &body));
            let mut changed = body;
            let at = at % changed.len();
            changed[at] ^= 1 << bit;
            prop_assert!(!is_signed(&secret(), &signature, &changed));
        }
    }
}
