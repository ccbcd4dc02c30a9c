//! The header of a git bundle (gitformat-bundle), which comes from a sandbox: everything that is
//! not exactly as expected is refused.

use anyhow::{Result, bail};

// A commit each for the few where a branch left its base.
const MAX_HEADER_BYTES: usize = 64 * 1024;

/// The header of a bundle with one branch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BundleHeader {
    /// The commits that a repository needs to have.
    pub(crate) prerequisites: Vec<String>,
    /// The commit of the branch.
    pub(crate) commit: String,
}

impl BundleHeader {
    /// Reads the header of a bundle of this branch, with its length; `None` when more bytes are
    /// needed.
    pub(crate) fn read(bytes: &[u8], branch: &str) -> Result<Option<(Self, usize)>> {
        let Some(end) = bytes.windows(2).position(|two| two == b"\n\n") else {
            if bytes.len() > MAX_HEADER_BYTES {
                bail!("the server sent no git bundle: its header has no end");
            }
            return Ok(None);
        };
        let Ok(text) = std::str::from_utf8(&bytes[..end]) else {
            bail!("the server sent no git bundle: its header is not text");
        };
        let mut lines = text.lines();
        if lines.next() != Some("# v2 git bundle") {
            bail!("the server sent no git bundle of version 2");
        }
        let (mut prerequisites, mut commits) = (Vec::new(), Vec::new());
        for line in lines {
            let (id, name) = line.split_once(' ').unwrap_or((line, ""));
            match id.strip_prefix('-') {
                Some(id) if is_id(id) && commits.is_empty() => prerequisites.push(id.to_owned()),
                None if is_id(id) && name.strip_prefix("refs/heads/") == Some(branch) => {
                    commits.push(id.to_owned());
                }
                _ => bail!("the bundle contains something else than the branch {branch}"),
            }
        }
        let Ok([commit]) = <[String; 1]>::try_from(commits) else {
            bail!("the bundle does not contain the branch {branch}");
        };
        Ok(Some((Self { prerequisites, commit }, end + 2)))
    }
}

fn is_id(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(digit: &str) -> String {
        digit.repeat(40)
    }

    #[test]
    fn header_names_branch_and_prerequisites() {
        let text = format!(
            "# v2 git bundle\n-{} first\n-{}\n{} refs/heads/harvest/x\n\nPACK",
            id("a"),
            id("b"),
            id("c")
        );
        let (header, length) =
            BundleHeader::read(text.as_bytes(), "harvest/x").unwrap().expect("it is complete");
        assert_eq!(header, BundleHeader { prerequisites: vec![id("a"), id("b")], commit: id("c") });
        assert_eq!(&text[length..], "PACK");
        for end in 0..length {
            assert!(
                BundleHeader::read(&text.as_bytes()[..end], "harvest/x").unwrap().is_none(),
                "{end}"
            );
        }
    }

    #[test]
    fn other_references_are_refused() {
        let c = id("c");
        for lines in [
            format!("{c} refs/heads/main"),
            format!("{c} refs/heads/x\n{c} refs/heads/main"),
            format!("{c} refs/heads/x\n-{c} late"),
            format!("{c} HEAD"),
            format!("--{c}"),
            "-x first".to_owned(),
            String::new(),
            "@filter=blob:none".to_owned(),
        ] {
            let text = format!("# v2 git bundle\n{lines}\n\n");
            assert!(BundleHeader::read(text.as_bytes(), "x").is_err(), "{lines}");
        }
        assert!(BundleHeader::read(b"# v3 git bundle\n\n", "x").is_err());
        assert!(BundleHeader::read(&[b'x'; MAX_HEADER_BYTES + 1], "x").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = BundleHeader::read(&bytes, "x");
            let bytes = [&b"# v2 git bundle\n"[..], &bytes, b"\n\n"].concat();
            prop_assert!(!matches!(BundleHeader::read(&bytes, "x"), Ok(None)));
        }
    }
}
