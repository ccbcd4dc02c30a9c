//! Masks secrets in a body while it is forwarded, also across the chunks of the body. The mask is
//! as long as the secret, so lengths in headers and git's packets stay valid. Pure.

use bytes::Bytes;
use harvest_proto::Secret;
use memchr::memmem;

use crate::vault::basic_credentials;

const MASK: u8 = b'*';
// A shorter secret may occur by chance in data that must not change.
const SHORTEST: usize = 8;

pub(crate) struct StreamRedactor {
    secrets: Vec<Vec<u8>>,
    /// The end of the last chunk, if it may be the start of a secret.
    held: Vec<u8>,
}

impl StreamRedactor {
    /// Also masks the base64 form of git's credentials.
    pub(crate) fn new(secrets: &[&Secret<String>]) -> Self {
        let forms = |secret: &&Secret<String>| {
            let secret = secret.expose().trim();
            [secret.to_owned(), basic_credentials(secret)].map(String::into_bytes)
        };
        let mut secrets: Vec<_> = secrets
            .iter()
            .filter(|secret| secret.expose().trim().len() >= SHORTEST)
            .flat_map(forms)
            .collect();
        // Longer ones first: a secret may contain another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self { secrets, held: Vec::new() }
    }

    /// The bytes that can be forwarded after this chunk.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.secrets.is_empty() {
            return chunk;
        }
        self.held.extend_from_slice(&chunk);
        for secret in &self.secrets {
            let found: Vec<_> = memmem::find_iter(&self.held, secret).collect();
            for at in found {
                self.held[at..at + secret.len()].fill(MASK);
            }
        }
        let held = self.held.split_off(self.held.len() - self.possible_start());
        std::mem::replace(&mut self.held, held).into()
    }

    /// The rest of the body.
    pub(crate) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// The length of the longest end of the held bytes with which a secret starts.
    fn possible_start(&self) -> usize {
        let starts = |secret: &Vec<u8>| {
            let longest = secret.len().saturating_sub(1);
            (1..=longest).rev().find(|length| self.held.ends_with(&secret[..*length]))
        };
        self.secrets.iter().filter_map(starts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: &str = "sk-ant-sk-secret";

    fn redact(chunks: &[&[u8]], secret: &str) -> Vec<u8> {
        let secret = Secret::new(secret.to_owned());
        let mut redactor = StreamRedactor::new(&[&secret]);
        let mut out = Vec::new();
        for chunk in chunks {
            out.extend(redactor.push(Bytes::copy_from_slice(chunk)));
        }
        out.extend(redactor.finish());
        out
    }

    #[test]
    fn short_secret_and_ordinary_text_are_untouched() {
        assert_eq!(redact(&[b"a b", b" c"], "b"), b"a b c");
        assert_eq!(redact(&[b"sk-ant", b"-else"], KEY), b"sk-ant-else");
    }

    #[test]
    fn ordinary_chunks_are_not_delayed() {
        let secret = Secret::new(KEY.to_owned());
        let mut redactor = StreamRedactor::new(&[&secret]);
        let event = Bytes::from_static(b"event: message_stop\ndata: {}\n\n");
        assert_eq!(redactor.push(event.clone()), event);
    }

    proptest! {
        #[test]
        fn secret_is_masked_wherever_chunks_end(
            before in "[a-z-]{0,20}",
            after in "[a-z-]{0,20}",
            encoded in any::<bool>(),
            cuts in prop::collection::vec(0usize..90, 0..4),
        ) {
            let secret = if encoded { basic_credentials(KEY) } else { KEY.to_owned() };
            let text = format!("{before}{secret}{after}");
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let chunks: Vec<_> = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]).collect();
            let expected = format!("{before}{}{after}", "*".repeat(secret.len()));
            prop_assert_eq!(redact(&chunks, KEY), expected.into_bytes());
        }
    }
}
