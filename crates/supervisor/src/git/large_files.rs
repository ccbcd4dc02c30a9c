//! Git LFS: its files stay the pointers that the commit contains. Harvest's own git commands run no
//! filter of LFS, and the agent's skip the download.

use std::path::Path;

use harvest_proto::bridge::Checkout;

use super::Git;
use crate::files;

/// Makes LFS leave pointers where an image has it.
pub(crate) const SKIP_DOWNLOAD: (&str, &str) = ("GIT_LFS_SKIP_SMUDGE", "1");

/// Prints the first file that LFS has, and the number of all of them.
const FIND: &str = r#"
found() { git -c core.quotePath=true ls-files -- ':(attr:filter=lfs)'; }
found | head -n 1 | cut -c 1-200
found | wc -l
"#;

impl Git<'_> {
    /// What to say about a checkout with files in LFS.
    pub(crate) async fn large_files(&self, checkout: &Checkout) -> Option<String> {
        let folder = self.folder(&checkout.folder);
        let attributes = Path::new(&folder).join(".gitattributes");
        // A file that cannot be read may name LFS.
        let attributes = files::read_small(&attributes, self.user);
        if attributes.is_ok_and(|text| text.is_none_or(|text| !text.contains("filter=lfs"))) {
            return None;
        }
        let argv = ["sh", "-c", FIND].map(str::to_owned).into();
        let (first, count) = parse(&self.capture(argv, &folder).await.ok()?)?;
        let name = &checkout.name;
        Some(format!(
            "{name} keeps files in Git LFS ({count} of them, such as {first}): they are pointers \
             here, their contents are not fetched; `.harvest/setup.sh` can fetch what the work needs from a \
             host that `harvest net allow -r {name} HOST` allows"
        ))
    }
}

fn parse(printed: &str) -> Option<(String, u64)> {
    let mut lines = printed.lines().rev();
    let count = lines.next()?.trim().parse().ok().filter(|count| *count > 0)?;
    Some((lines.next()?.trim_matches('"').to_owned(), count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_file_and_number_are_parsed() {
        assert_eq!(parse("a.bin\n   3\n"), Some(("a.bin".to_owned(), 3)));
        assert_eq!(parse("0\n"), None);
        assert_eq!(parse("fatal: no repository\n"), None);
    }
}
