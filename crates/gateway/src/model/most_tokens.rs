//! The most tokens that a request may use, before it is sent. Pure; knows no model's limits.

mod image_bytes;

use serde::{Deserialize, Deserializer, de::IgnoredAny};

use crate::ledger::MostTokens;

// Cautious: a token of English text has four bytes, of code three, of other scripts up to three.
const BYTES_PER_TOKEN: u64 = 3;

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

/// A JSON number, which some clients write as `4096.0`; a negative one counts as 0.
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

/// The most tokens of a request body.
///
/// # Errors
/// When a bound cannot be read.
pub(crate) fn most_tokens(body: &[u8]) -> Result<MostTokens, String> {
    let bounds: Bounds = serde_json::from_slice(body)
        .map_err(|error| format!("the request is malformed: {error}"))?;
    let stored = [
        &bounds.previous_response_id,
        &bounds.conversation,
        &bounds.prompt,
        &bounds.cached_content,
    ];
    let input = match stored.iter().any(|one| one.is_some()) {
        true => None,
        false => {
            let text = (body.len() as u64).saturating_sub(image_bytes::image_bytes(body));
            Some(text.div_ceil(BYTES_PER_TOKEN))
        }
    };
    let generation = bounds.generation.as_ref();
    let limits = [
        bounds.max_tokens.as_ref(),
        bounds.max_completion_tokens.as_ref(),
        bounds.max_output_tokens.as_ref(),
        generation.and_then(|one| one.max.as_ref()),
    ];
    let counts = [bounds.n.as_ref(), generation.and_then(|one| one.candidates.as_ref())];
    let most = |all: &[Option<&Count>]| all.iter().flatten().map(|count| count.0).max();
    Ok(MostTokens { input, output: most(&limits), responses: most(&counts).unwrap_or(1).max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most(body: &str) -> (Option<u64>, u64) {
        let most = most_tokens(body.as_bytes()).unwrap();
        (most.output, most.responses)
    }

    #[test]
    fn bounds_of_every_protocol_are_read() {
        assert_eq!(most(r#"{"max_tokens":32000,"messages":[]}"#), (Some(32_000), 1));
        assert_eq!(most(r#"{"max_output_tokens":5.0,"input":[]}"#), (Some(5), 1));
        assert_eq!(most(r#"{"max_tokens":null,"max_completion_tokens":7,"n":4}"#), (Some(7), 4));
        let gemini = r#"{"generationConfig":{"maxOutputTokens":9,"candidateCount":2}}"#;
        assert_eq!(most(gemini), (Some(9), 2));
        let other = r#"{"generation_config":{"max_output_tokens":9,"candidate_count":2}}"#;
        assert_eq!(most(other), (Some(9), 2));
        assert_eq!(most(r#"{"n":0,"max_tokens":-1}"#), (Some(0), 1));
        assert_eq!(most("{}"), (None, 1));
    }

    #[test]
    fn input_is_estimated_from_bytes_unless_stored() {
        let input = |body: &str| most_tokens(body.as_bytes()).unwrap().input;
        assert_eq!(input(&format!(r#"{{"input":"{}"}}"#, "x".repeat(288))), Some(100));
        for stored in ["previous_response_id", "conversation", "prompt", "cachedContent"] {
            assert_eq!(input(&format!(r#"{{"{stored}":"id"}}"#)), None, "{stored}");
        }
        assert_eq!(input(r#"{"conversation":null}"#), Some(7));
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
            assert!(most_tokens(body.as_bytes()).is_err(), "{body}");
        }
    }
}
