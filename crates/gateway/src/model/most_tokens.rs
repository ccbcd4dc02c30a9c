//! The most tokens that a request may use, before it is sent. Pure; knows no model's limits.

mod contents;

use contents::Contents;
use serde::{Deserialize, Deserializer, de::IgnoredAny};

use super::route::Endpoint;
use crate::ledger::MostTokens;

// Cautious: a token of English text has four bytes, of code three, of other scripts up to three.
const BYTES_PER_TOKEN: u64 = 3;

// OpenAI's limit.
const MAX_RESPONSES: u64 = 128;

/// The fields of all four protocols that bound a response, and those that name input stored at the
/// service. Gemini accepts two spellings. A field that is given twice, or that is no number, is
/// refused: the service might read another number.
#[derive(Deserialize)]
struct Bounds {
    max_tokens: Option<Count>,
    max_completion_tokens: Option<Count>,
    max_output_tokens: Option<Count>,
    n: Option<Count>,
    #[serde(rename = "generationConfig", alias = "generation_config")]
    generation: Option<Generation>,
    previous_response_id: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    #[serde(rename = "cachedContent", alias = "cached_content")]
    cached_content: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Generation {
    #[serde(rename = "maxOutputTokens", alias = "max_output_tokens")]
    max: Option<Count>,
    #[serde(rename = "candidateCount", alias = "candidate_count")]
    candidates: Option<Count>,
}

/// A JSON number, which some clients write as `4096.0`; a negative one is read as 0. Zero is no
/// bound: some servers take it for none.
struct Count(u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and the service reads no fraction"
        )]
        f64::deserialize(from).map(|number| Self(number as u64))
    }
}

impl Bounds {
    /// The number of tokens of a response and the number of responses, as far as the protocol has a
    /// field for it: services ignore the fields of others.
    fn of(&self, endpoint: Endpoint) -> (Option<u64>, Option<u64>) {
        let generation = self.generation.as_ref();
        let (limits, responses) = match endpoint {
            Endpoint::Messages => ([self.max_tokens.as_ref(), None], None),
            Endpoint::Responses => ([self.max_output_tokens.as_ref(), None], None),
            Endpoint::Chat => {
                let limits = [self.max_tokens.as_ref(), self.max_completion_tokens.as_ref()];
                (limits, self.n.as_ref())
            }
            Endpoint::Gemini => {
                let limit = generation.and_then(|one| one.max.as_ref());
                ([limit, None], generation.and_then(|one| one.candidates.as_ref()))
            }
            Endpoint::CountTokens
            | Endpoint::Models
            | Endpoint::GeminiCount
            | Endpoint::GeminiModels => ([None, None], None),
        };
        let given = |count: &Count| Some(count.0).filter(|count| *count > 0);
        (limits.into_iter().flatten().filter_map(given).max(), responses.and_then(given))
    }

    fn names_stored_input(&self) -> bool {
        let Self { previous_response_id, conversation, prompt, cached_content, .. } = self;
        [previous_response_id, conversation, prompt, cached_content].iter().any(|one| one.is_some())
    }
}

/// The most tokens of a request body.
///
/// # Errors
/// When a bound cannot be read, or is beyond all services'.
pub(crate) fn most_tokens(endpoint: Endpoint, body: &[u8]) -> Result<MostTokens, String> {
    let bounds: Bounds = serde_json::from_slice(body)
        .map_err(|error| format!("the request is malformed: {error}"))?;
    let Contents { image_bytes, has_references } = Contents::of(body);
    let input = match has_references || bounds.names_stored_input() {
        true => None,
        false => Some((body.len() as u64).saturating_sub(image_bytes).div_ceil(BYTES_PER_TOKEN)),
    };
    let (output, responses) = bounds.of(endpoint);
    let responses = responses.unwrap_or(1);
    if responses > MAX_RESPONSES {
        return Err(format!("the request asks for more than {MAX_RESPONSES} responses"));
    }
    Ok(MostTokens { input, output, responses })
}

#[cfg(test)]
mod tests {
    use super::*;

    const USING_TOKENS: [Endpoint; 4] =
        [Endpoint::Messages, Endpoint::Responses, Endpoint::Chat, Endpoint::Gemini];

    fn most(endpoint: Endpoint, body: &str) -> (Option<u64>, u64) {
        let most = most_tokens(endpoint, body.as_bytes()).unwrap();
        (most.output, most.responses)
    }

    #[test]
    fn bounds_of_every_protocol_are_read() {
        use Endpoint::{Chat, Gemini, Messages, Responses};
        let bounded = r#"{"max_tokens":32000,"messages":[]}"#;
        assert_eq!(most(Messages, bounded), (Some(32_000), 1));
        assert_eq!(most(Responses, r#"{"max_output_tokens":5.0,"input":[]}"#), (Some(5), 1));
        let chat = r#"{"max_tokens":null,"max_completion_tokens":7,"n":4}"#;
        assert_eq!(most(Chat, chat), (Some(7), 4));
        assert_eq!(most(Chat, r#"{"max_tokens":8,"max_completion_tokens":7}"#), (Some(8), 1));
        let gemini = r#"{"generationConfig":{"maxOutputTokens":9,"candidateCount":2}}"#;
        assert_eq!(most(Gemini, gemini), (Some(9), 2));
        let other = r#"{"generation_config":{"max_output_tokens":9,"candidate_count":2}}"#;
        assert_eq!(most(Gemini, other), (Some(9), 2));
        for endpoint in USING_TOKENS {
            assert_eq!(most(endpoint, "{}"), (None, 1));
        }
    }

    #[test]
    fn limit_of_other_protocol_is_ignored() {
        use Endpoint::{Chat, Gemini, Messages, Responses};
        for (name, own) in [
            (r#""max_tokens":1"#, &[Messages, Chat][..]),
            (r#""max_completion_tokens":1"#, &[Chat]),
            (r#""max_output_tokens":1"#, &[Responses]),
            (r#""generationConfig":{"maxOutputTokens":1}"#, &[Gemini]),
        ] {
            for endpoint in USING_TOKENS {
                let expected = own.contains(&endpoint).then_some(1);
                assert_eq!(most(endpoint, &format!("{{{name}}}")).0, expected, "{endpoint:?}");
            }
        }
    }

    #[test]
    fn bound_below_one_is_none() {
        for count in ["0", "-1", "0.5"] {
            let body = format!(r#"{{"n":{count},"max_tokens":{count}}}"#);
            assert_eq!(most(Endpoint::Chat, &body), (None, 1), "{count}");
        }
    }

    #[test]
    fn absurd_number_of_responses_is_refused() {
        for body in [r#"{"n":1e18}"#, r#"{"n":129}"#] {
            let refused = most_tokens(Endpoint::Chat, body.as_bytes()).unwrap_err();
            assert!(refused.contains("more than 128 responses"), "{refused}");
        }
        assert_eq!(most(Endpoint::Chat, r#"{"n":128}"#), (None, 128));
        let gemini = br#"{"generationConfig":{"candidateCount":1000000}}"#;
        assert!(most_tokens(Endpoint::Gemini, gemini).is_err());
    }

    #[test]
    fn input_is_estimated_from_bytes_unless_stored() {
        let input = |body: &str| most_tokens(Endpoint::Chat, body.as_bytes()).unwrap().input;
        assert_eq!(input(&format!(r#"{{"input":"{}"}}"#, "x".repeat(288))), Some(100));
        for stored in ["previous_response_id", "conversation", "prompt", "cachedContent"] {
            assert_eq!(input(&format!(r#"{{"{stored}":"id"}}"#)), None, "{stored}");
        }
        assert_eq!(input(r#"{"conversation":null}"#), Some(7));
        assert_eq!(input(r#"{"input":[{"file_id":"file_1"}]}"#), None);
    }

    #[test]
    fn ambiguous_bounds_are_refused() {
        for body in [
            r#"{"n":1,"n":100}"#,
            r#"{"max_tokens":1,"max\u005ftokens":100}"#,
            r#"{"generationConfig":{},"generation_config":{"candidateCount":8}}"#,
            r#"{"n":"8"}"#,
            "[]x",
        ] {
            assert!(most_tokens(Endpoint::Chat, body.as_bytes()).is_err(), "{body}");
        }
    }
}
