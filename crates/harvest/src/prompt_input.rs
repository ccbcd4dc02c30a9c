//! Reads a prompt from the command line, standard input, a file or the user's editor.

use std::{
    fs,
    io::{IsTerminal, Read},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use harvest_proto::{
    PromptId, PromptText,
    names::{InvalidPrompt, MAX_PROMPT_CHARACTERS},
};

use tokio::signal::unix::{SignalKind, signal};

use crate::{cli::PromptArgs, printer::Advice};

// A character has at most four bytes in UTF-8.
const MAX_PROMPT_BYTES: usize = 4 * MAX_PROMPT_CHARACTERS;

const SOURCES: &str =
    "write it in quotes; `-` reads standard input, `@FILE` a file, and `-i` opens your editor";

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PromptSource {
    Text(String),
    Stdin,
    File(PathBuf),
    /// The editor opens with this text.
    Editor(String),
}

impl PromptSource {
    /// The source of the one prompt of `run` and `send`.
    pub(crate) fn one(args: PromptArgs) -> Result<Self> {
        decide(args, std::io::stdin().is_terminal())
    }

    /// The sources of the prompts of `fork`, which has none, one or several.
    pub(crate) fn several(typed: Vec<String>, editor: bool) -> Result<Vec<Self>> {
        match editor {
            true => Ok(vec![decide(words_of(typed, editor), true)?]),
            false => Ok(typed.into_iter().map(Self::parse).collect()),
        }
    }

    /// `@FILE` has no spaces: a text such as `@alice asks for …` is a prompt.
    fn parse(typed: String) -> Self {
        match typed.strip_prefix('@') {
            _ if typed == "-" => Self::Stdin,
            Some(file) if !file.is_empty() && !file.contains(char::is_whitespace) => {
                Self::File(file.into())
            }
            _ => Self::Text(typed),
        }
    }

    /// Reads the prompt and checks it.
    pub(crate) fn read(self) -> Result<PromptText> {
        let text = match self {
            Self::Text(text) => text,
            Self::Stdin => read_text(std::io::stdin().lock()).context("cannot read the prompt")?,
            Self::File(file) => read_file(&file).map_err(|error| {
                error.context(Advice::new(
                    format!("cannot read the prompt from {}", file.display()),
                    "`@FILE` names a file; a prompt that begins with `@` is read from `-`",
                ))
            })?,
            Self::Editor(initial) => edit(&initial)?,
        };
        check(&text)
    }
}

fn words_of(mut typed: Vec<String>, editor: bool) -> PromptArgs {
    let more = typed.split_off(typed.len().min(1));
    PromptArgs { prompt: typed.pop(), more, editor }
}

fn decide(args: PromptArgs, terminal: bool) -> Result<PromptSource> {
    let PromptArgs { prompt, more, editor } = args;
    if !more.is_empty() {
        let text = prompt.into_iter().chain(more).collect::<Vec<_>>().join(" ");
        bail!(Advice::usage(
            "the prompt has more than one argument",
            format!("quote the prompt: \"{text}\"")
        ));
    }
    match prompt {
        None if editor => Ok(PromptSource::Editor(String::new())),
        None if terminal => bail!(Advice::usage("no prompt given", SOURCES)),
        None => Ok(PromptSource::Stdin),
        Some(typed) if editor => Ok(PromptSource::Editor(typed)),
        Some(typed) => Ok(PromptSource::parse(typed)),
    }
}

fn check(text: &str) -> Result<PromptText> {
    text.trim_end().parse().map_err(|error: InvalidPrompt| {
        let hint = match error {
            InvalidPrompt::Empty => SOURCES,
            InvalidPrompt::TooLong => {
                "put the text into a file of the repository, or copy it with `harvest cp`, and name the file in the prompt"
            }
        };
        Advice::usage(error.to_string(), hint).into()
    })
}

fn read_file(path: &Path) -> Result<String> {
    read_text(fs::File::open(path)?)
}

/// Reads little more than the longest prompt, whatever the input's length.
fn read_text(from: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_PROMPT_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_PROMPT_BYTES {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes).context("the text is not UTF-8")
}

/// Runs the editor on a new file, as git does: the variable may contain arguments.
fn edit(initial: &str) -> Result<String> {
    let folder = std::env::temp_dir().join(format!("harvest-{}", PromptId::random().part()));
    std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700)
        .create(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    // Ctrl-C is for the editor: if this process ended, the file would stay and the shell would take
    // the terminal back.
    let _ignored = signal(SignalKind::interrupt());
    let edited = edit_in(&folder.join("prompt.md"), initial);
    let removed = fs::remove_dir_all(&folder);
    let text = edited?;
    removed.with_context(|| format!("cannot remove {}", folder.display()))?;
    Ok(text)
}

fn edit_in(file: &Path, initial: &str) -> Result<String> {
    fs::write(file, initial).with_context(|| format!("cannot write {}", file.display()))?;
    let set = |name| std::env::var(name).ok().filter(|editor| !editor.is_empty());
    let editor = set("VISUAL").or_else(|| set("EDITOR")).unwrap_or_else(|| "vi".to_owned());
    let status = Command::new("sh")
        .args(["-c", &format!("{editor} \"$@\""), &editor])
        .arg(file)
        .status()
        .context("cannot run `sh`")?;
    if !status.success() {
        bail!(Advice::new(
            format!("the editor `{editor}` failed ({status})"),
            "set EDITOR to your editor, such as `EDITOR=nano`"
        ));
    }
    read_file(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::hint_of;

    fn source(typed: &[&str], editor: bool, terminal: bool) -> Result<PromptSource> {
        let typed = typed.iter().map(ToString::to_string).collect();
        decide(words_of(typed, editor), terminal)
    }

    #[test]
    fn prompt_source_follows_arguments_and_terminal() {
        let text = |text: &str| PromptSource::Text(text.into());
        assert_eq!(source(&["fix it"], false, true).unwrap(), text("fix it"));
        assert_eq!(source(&["-"], false, true).unwrap(), PromptSource::Stdin);
        assert_eq!(source(&["@a/b.md"], false, true).unwrap(), PromptSource::File("a/b.md".into()));
        assert_eq!(source(&["@me says"], false, true).unwrap(), text("@me says"));
        assert_eq!(source(&["@"], false, true).unwrap(), text("@"));
        assert_eq!(source(&[], false, false).unwrap(), PromptSource::Stdin);
        assert_eq!(source(&[], true, true).unwrap(), PromptSource::Editor(String::new()));
        assert_eq!(source(&["fix"], true, true).unwrap(), PromptSource::Editor("fix".into()));
        assert!(source(&[], false, true).is_err());
    }

    #[test]
    fn unquoted_words_get_a_quoted_hint() {
        let error = source(&["fix", "the", "test"], false, true).unwrap_err();
        assert_eq!(hint_of(&error).unwrap(), "quote the prompt: \"fix the test\"");
    }

    #[test]
    fn blank_and_long_prompts_are_refused() {
        for (text, reason) in [(" \n".to_owned(), "empty"), ("x".repeat(64_001), "longer")] {
            let error = check(&text).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
        assert_eq!(check("fix it\n\n").unwrap().as_str(), "fix it");
    }
}
