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
    /// The end of what came so far, if it may be the start of a secret. Not masked yet: it can be
    /// the start of one secret and contain another.
    held: Vec<u8>,
    /// How many of the held bytes are the end of a secret.
    masked: usize,
}

impl StreamRedactor {
    /// Also masks the base64 form of git's credentials.
    pub(crate) fn new(secrets: &[&Secret<String>]) -> Self {
        let forms = |secret: &&Secret<String>| {
            let secret = secret.expose().trim();
            [secret.to_owned(), basic_credentials(secret)].map(String::into_bytes)
        };
        let secrets = secrets
            .iter()
            .filter(|secret| secret.expose().trim().len() >= SHORTEST)
            .flat_map(forms)
            .collect();
        Self { secrets, held: Vec::new(), masked: 0 }
    }

    /// The bytes that can be forwarded after this chunk.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.secrets.is_empty() {
            return chunk;
        }
        self.held.extend_from_slice(&chunk);
        self.release(self.held.len() - self.possible_start())
    }

    /// The rest of the body.
    pub(crate) fn finish(&mut self) -> Bytes {
        self.release(self.held.len())
    }

    /// Removes and masks the first bytes.
    fn release(&mut self, length: usize) -> Bytes {
        let starts = |secret: &Vec<u8>| {
            let length = secret.len();
            memmem::find_iter(&self.held, secret).map(|at| (at, at + length)).collect::<Vec<_>>()
        };
        // All are found before any is masked: they can overlap.
        let mut found: Vec<_> = self.secrets.iter().flat_map(starts).collect();
        found.push((0, self.masked));
        let held = self.held.split_off(length);
        let mut released = std::mem::replace(&mut self.held, held);
        self.masked = 0;
        for (start, end) in found.into_iter().filter(|(start, _)| *start < length) {
            released[start..end.min(length)].fill(MASK);
            self.masked = self.masked.max(end.saturating_sub(length));
        }
        released.into()
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
    fn overlapping_secrets_are_masked_across_chunks() {
        let secrets = ["abcdefgh", "abcdefgh-and-more", "gh-another"]
            .map(|secret| Secret::new(secret.to_owned()));
        let secrets: Vec<_> = secrets.iter().collect();
        for (text, masked) in [
            ("a abcdefgh-and-more.", (17, ".")),
            ("a abcdefgh.", (8, ".")),
            ("a abcdefgh-and", (8, "-and")),
            ("a abcdefgh-another.", (16, ".")),
        ] {
            let masked = format!("a {}{}", "*".repeat(masked.0), masked.1);
            for cut in 0..text.len() {
                let mut redactor = StreamRedactor::new(&secrets);
                let parts = [&text[..cut], &text[cut..]];
                let mut out: Vec<u8> = Vec::new();
                for part in parts {
                    out.extend(redactor.push(Bytes::copy_from_slice(part.as_bytes())));
                }
                out.extend(redactor.finish());
                assert_eq!(String::from_utf8(out).unwrap(), masked, "{cut}");
            }
        }
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
