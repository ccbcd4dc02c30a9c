//! The author of commits in the text of a git configuration. Pure.

/// The configuration with this author in its section `user`. `None` for text that only git itself
/// can change safely.
pub(super) fn with_author(config: &str, name: &str, email: &str) -> Option<String> {
    let author = format!("\tname = {}\n\temail = {}\n", quoted(name)?, quoted(email)?);
    let (mut lines, mut in_user, mut header) = (Vec::new(), false, None);
    for line in config.lines() {
        let trimmed = line.trim();
        // A value that goes on in the next line.
        if trimmed.ends_with('\\') {
            return None;
        }
        if trimmed.starts_with('[') {
            in_user = trimmed.to_ascii_lowercase().starts_with("[user]");
            if in_user && trimmed.len() > "[user]".len() {
                return None;
            }
            lines.push(line);
            header = if in_user { Some(lines.len()) } else { header };
        } else if !(in_user && is_author(trimmed)) {
            lines.push(line);
        }
    }
    let text = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let (before, after) = lines.split_at(header.unwrap_or(lines.len()));
    let section = if header.is_some() { "" } else { "[user]\n" };
    Some(text(before) + section + &author + &text(after))
}

fn is_author(line: &str) -> bool {
    let key = line.split(['=', ' ', '\t']).next().unwrap_or_default();
    key.eq_ignore_ascii_case("name") || key.eq_ignore_ascii_case("email")
}

fn quoted(value: &str) -> Option<String> {
    if value.chars().any(char::is_control) {
        return None;
    }
    Some(format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"")))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn read_by_git(config: &str, key: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        std::fs::write(&file, config).unwrap();
        let mut git = Command::new("git");
        git.args(["config", "--file"]).arg(&file).args(["--get-all", key]);
        String::from_utf8(git.output().unwrap().stdout).unwrap()
    }

    #[test]
    fn author_is_replaced_and_the_rest_kept() {
        let config = "[safe]\n\tdirectory = *\n[user]\n\tname = Old\n\tsigningkey = k\n\temail=o@x\n\
                      [User]\n\tName = Older\n[push]\n\tdefault = simple\n";
        let new = with_author(config, "Ada \"A\" \\ #;", "ada@example.org").unwrap();
        assert_eq!(read_by_git(&new, "user.name"), "Ada \"A\" \\ #;\n");
        assert_eq!(read_by_git(&new, "user.email"), "ada@example.org\n");
        assert_eq!(read_by_git(&new, "user.signingkey"), "k\n");
        assert_eq!(read_by_git(&new, "push.default"), "simple\n");
        let again = with_author(&new, "Ada \"A\" \\ #;", "ada@example.org").unwrap();
        assert_eq!(again, new);
    }

    #[test]
    fn unusual_text_is_left_to_git() {
        for config in ["[user] name = x\n", "[core]\n\tpager = a \\\n[user]\n"] {
            assert_eq!(with_author(config, "A", "a@x"), None, "{config}");
        }
        assert_eq!(with_author("", "A\n[core]", "a@x"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn git_reads_every_author(name in "[^\\p{Cc}]{1,20}", email in "[ -~]{1,20}") {
            let new = with_author("[alias]\n\tx = y\n", &name, &email).unwrap();
            prop_assert_eq!(read_by_git(&new, "user.name"), format!("{name}\n"));
            prop_assert_eq!(read_by_git(&new, "user.email"), format!("{email}\n"));
            prop_assert_eq!(with_author(&new, &name, &email), Some(new));
        }
    }
}
