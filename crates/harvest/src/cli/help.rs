//! The help: verbs grouped by topic, an example of each, and suggestions for verbs of other tools.

use clap::{
    Command, CommandFactory,
    error::{ContextKind, ContextValue, ErrorKind},
};
use harvest_proto::suggest::closest;

use super::Cli;

/// The verbs by topic, in the order of the help.
pub(crate) const TOPICS: &[(&str, &[&str])] = &[
    ("Get started", &["quickstart", "up", "down", "doctor", "help", "version"]),
    (
        "Sessions",
        &[
            "run",
            "ls",
            "show",
            "attach",
            "send",
            "queue",
            "stop",
            "pause",
            "resume",
            "fork",
            "restore",
            "sync",
            "terminate",
            "archive",
            "rm",
        ],
    ),
    (
        "History and changes",
        &["turns", "diff", "logs", "events", "artifacts", "pull", "pr", "verify"],
    ),
    (
        "Repositories and access",
        &[
            "repo", "schedule", "memory", "secret", "models", "budget", "stats", "net", "token",
            "user",
        ],
    ),
    ("Sandboxes", &["exec", "shell", "cp", "sandbox"]),
    ("Storage", &["image", "snapshot", "volume", "backup", "df", "gc"]),
    ("Settings and scripts", &["config", "api", "mcp", "completion"]),
];

/// Examples by verb, one per line. A test parses them.
const EXAMPLES: &[(&str, &str)] = &[
    ("quickstart", "harvest quickstart\nharvest quickstart -a codex"),
    ("up", "harvest up -d"),
    ("down", "harvest down"),
    ("doctor", "harvest doctor"),
    ("help", "harvest help run"),
    ("version", "harvest version"),
    (
        "run",
        "harvest run \"make the parser accept tabs\"\n\
         harvest run -r https://git.example.org/me/app -b main @task.md\n\
         git diff | harvest run -",
    ),
    ("ls", "harvest ls --state running\nharvest ls -r me/app --all"),
    ("show", "harvest show -"),
    ("attach", "harvest attach -"),
    (
        "send",
        "harvest send - \"and add a test\"\nharvest send 4kq --now -f \"stop that, use serde\"",
    ),
    ("queue ls", "harvest queue ls -"),
    ("queue rm", "harvest queue rm - prm_4kq"),
    ("queue mv", "harvest queue mv - prm_4kq 1"),
    ("stop", "harvest stop -"),
    ("pause", "harvest pause 4kq"),
    ("resume", "harvest resume 4kq"),
    ("fork", "harvest fork -@2\nharvest fork 4kq \"use a regex\" \"write a parser\""),
    ("restore", "harvest restore -@1\nharvest restore - --snapshot \"before the rewrite\""),
    ("sync", "harvest sync -"),
    ("terminate", "harvest terminate 4kq"),
    ("archive", "harvest archive 4kq"),
    ("rm", "harvest rm 4kq b81 --yes"),
    ("turns", "harvest turns -"),
    ("artifacts", "harvest artifacts - report.html -o report.html"),
    ("diff", "harvest diff - --stat\nharvest diff -t 1..3 4kq"),
    ("logs", "harvest logs -f -"),
    ("events", "harvest events - --types tool_ended,turn_ended"),
    ("exec", "harvest exec -- python3 -V\nharvest exec - -- pytest -q"),
    ("shell", "harvest shell -"),
    ("cp", "harvest cp -r -:/workspace/app/dist .\nharvest cp data.csv sbx_4kq:/tmp/"),
    ("pull", "harvest pull -\nharvest pull 4kq --into ~/src/app --as try-harvest"),
    ("pr show", "harvest pr show -"),
    ("pr create", "harvest pr create - --title \"Fix the login\" --draft"),
    ("pr update", "harvest pr update - --body \"Fixes #12\"\nharvest pr update - --ready"),
    ("pr merge", "harvest pr merge -"),
    ("verify", "harvest verify -\nharvest verify me/app@fix-login\nharvest verify me/app#12"),
    ("repo add", "harvest repo add https://git.example.org/me/app --secret GIT_TOKEN"),
    ("repo set", "harvest repo set me/app --image full\nharvest repo set me/app --unset base"),
    ("repo show", "harvest repo show me/app"),
    ("repo build", "harvest repo build me/app\nharvest repo build --all"),
    ("repo builds", "harvest repo builds me/app"),
    ("repo logs", "harvest repo logs me/app"),
    ("repo ls", "harvest repo ls"),
    ("repo app", "harvest repo app \"My bot\" --key app.pem -r app"),
    ("repo rm", "harvest repo rm me/app"),
    ("schedule ls", "harvest schedule ls"),
    ("schedule runs", "harvest schedule runs --json"),
    ("schedule run", "harvest schedule run"),
    ("schedule pause", "harvest schedule pause"),
    ("schedule resume", "harvest schedule resume"),
    ("memory show", "harvest memory show me/app"),
    ("memory import", "harvest memory import me/app memory.jsonl"),
    ("memory export", "harvest memory export me/app"),
    ("memory clear", "harvest memory clear me/app"),
    ("secret set", "harvest secret set ANTHROPIC_API_KEY < key.txt"),
    ("secret ls", "harvest secret ls"),
    ("secret rm", "harvest secret rm GIT_TOKEN"),
    ("secret uses", "harvest secret uses SLACK_BOT_TOKEN"),
    ("models", "harvest models"),
    ("budget", "harvest budget - 5\nharvest budget --day 20"),
    ("stats", "harvest stats --since 24h --by session"),
    ("net ls", "harvest net ls -r me/app"),
    ("net log", "harvest net log -"),
    ("net allow", "harvest net allow ses_1a2b3c4d5e6f api.example.org db.example.org:5432"),
    ("net deny", "harvest net deny --everywhere '*.example.org'"),
    ("net rm", "harvest net rm -r me/app example.org"),
    (
        "token create",
        "harvest token create laptop\nharvest token create bob --user-name Bob --email bob@example.org",
    ),
    ("token ls", "harvest token ls"),
    ("token rm", "harvest token rm laptop"),
    ("user ls", "harvest user ls"),
    ("user set", "harvest user set bob@example.org --sandboxes 4 --memory 8g"),
    ("api", "harvest api GET sessions\nharvest api POST sessions -d '{\"prompt\": \"fix it\"}'"),
    ("completion", "harvest completion bash"),
    ("mcp", "harvest mcp"),
    ("config", "harvest config\nharvest config image"),
    ("image build", "harvest image build claude"),
    ("image pull", "harvest image pull docker.io/library/debian:12 --name debian"),
    ("image import", "harvest image import mine rootfs.tar.gz"),
    ("image ls", "harvest image ls"),
    ("image inspect", "harvest image inspect claude"),
    ("image rm", "harvest image rm mine"),
    ("sandbox create", "harvest sandbox create --image base --memory 2g"),
    ("sandbox ls", "harvest sandbox ls"),
    ("sandbox inspect", "harvest sandbox inspect -"),
    ("sandbox cp", "harvest sandbox cp sbx_4kq:/workspace/note note"),
    ("sandbox shell", "harvest sandbox shell -u root -"),
    ("sandbox snapshot", "harvest sandbox snapshot -"),
    ("sandbox restore", "harvest sandbox restore sbx_4kq snp_b81"),
    ("sandbox fork", "harvest sandbox fork -n 3 -"),
    ("sandbox stop", "harvest sandbox stop sbx_4kq"),
    ("sandbox start", "harvest sandbox start sbx_4kq"),
    ("sandbox plan", "harvest sandbox plan"),
    ("sandbox rm", "harvest sandbox rm sbx_4kq\nharvest sandbox rm --all"),
    ("snapshot create", "harvest snapshot create - --name \"before the rewrite\""),
    ("snapshot ls", "harvest snapshot ls\nharvest snapshot ls -"),
    ("snapshot pin", "harvest snapshot pin -@2"),
    ("snapshot unpin", "harvest snapshot unpin -@2"),
    ("snapshot rm", "harvest snapshot rm snp_4kq"),
    ("volume create", "harvest volume create data --size 256m"),
    ("volume ls", "harvest volume ls"),
    ("volume rm", "harvest volume rm data"),
    ("backup create", "harvest backup create\nharvest backup create before-upgrade.tar.gz"),
    ("backup load", "harvest backup load before-upgrade.tar.gz"),
    ("df", "harvest df -v"),
    ("gc", "harvest gc --dry-run"),
];

/// Words that users of other tools type, and the verb they mean.
const SYNONYMS: &[(&str, &str)] = &[
    ("sessions", "ls"),
    ("list", "ls"),
    ("ps", "ls"),
    ("new", "run"),
    ("start", "run"),
    ("status", "show"),
    ("follow", "attach"),
    ("prompt", "send"),
    ("continue", "send"),
    ("prompts", "queue"),
    ("cancel", "stop"),
    ("kill", "terminate"),
    ("delete", "rm"),
    ("remove", "rm"),
    ("history", "logs"),
    ("undo", "restore"),
    ("ssh", "shell"),
    ("copy", "cp"),
    ("repositories", "repo"),
    ("keys", "secret"),
    ("cost", "stats"),
    ("usage", "stats"),
    ("tokens", "token"),
    ("images", "image"),
    ("sandboxes", "sandbox"),
    ("snapshots", "snapshot"),
    ("volumes", "volume"),
    ("prune", "gc"),
    ("serve", "up"),
    ("server", "up"),
    ("init", "quickstart"),
];

/// The command definition with its help.
pub(crate) fn command() -> Command {
    let command = with_examples(Cli::command(), "");
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}Global options:\n{{options}}{{after-help}}",
        topics(&command)
    );
    command.help_template(template)
}

/// A verb's examples; those of all its verbs for a verb with verbs.
fn with_examples(command: Command, path: &str) -> Command {
    let below = format!("{path} ");
    let of_path = |name: &str| path == name || (!path.is_empty() && name.starts_with(&below));
    let examples: Vec<&str> = EXAMPLES
        .iter()
        .filter(|(name, _)| of_path(name))
        .flat_map(|(_, examples)| examples.lines())
        .collect();
    let command = match &examples[..] {
        [] => command,
        [one] => command.after_help(format!("Example:\n  {one}")),
        several => command.after_help(format!("Examples:\n  {}", several.join("\n  "))),
    };
    command.mut_subcommands(|inner| {
        let path = format!("{path} {}", inner.get_name()).trim().to_owned();
        with_examples(inner, &path)
    })
}

/// The verbs with their descriptions, below the topics.
fn topics(command: &Command) -> String {
    let line = |name: &&str| {
        let verb = command.find_subcommand(name)?;
        Some(format!("  {name:<12}{}\n", verb.get_about()?))
    };
    let topic = |(title, verbs): &(&str, &[&str])| {
        format!("{title}:\n{}\n", verbs.iter().filter_map(line).collect::<String>())
    };
    TOPICS.iter().map(topic).collect()
}

/// Replaces clap's suggestion in the error about an unknown verb if a synonym is closer.
pub(super) fn suggest(mut error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return error;
    }
    if let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(verb) = meant(typed)
    {
        let suggested = ContextValue::Strings(vec![verb.to_owned()]);
        error.insert(ContextKind::SuggestedSubcommand, suggested);
    }
    error
}

fn meant(typed: &str) -> Option<&'static str> {
    let verbs = TOPICS.iter().flat_map(|(_, verbs)| verbs.iter().copied());
    let word = closest(typed, SYNONYMS.iter().map(|(word, _)| *word).chain(verbs))?;
    let synonym = SYNONYMS.iter().find(|(synonym, _)| *synonym == word);
    Some(synonym.map_or(word, |(_, verb)| *verb))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The paths of all verbs without verbs of their own.
    fn leaves(command: &Command, path: &str) -> Vec<String> {
        let inner: Vec<_> = command.get_subcommands().filter(|verb| !verb.is_hide_set()).collect();
        match inner.is_empty() {
            true => vec![path.to_owned()],
            false => {
                let leaves_of =
                    |verb: &&Command| leaves(verb, format!("{path} {}", verb.get_name()).trim());
                inner.iter().flat_map(leaves_of).collect()
            }
        }
    }

    /// Splits a line as a shell would: quotes, and nothing after `<` or before `|`.
    fn words(line: &str) -> Vec<String> {
        let command = line.rsplit(" | ").next().unwrap().split(" < ").next().unwrap();
        let (mut words, mut quote) = (vec![String::new()], None);
        for letter in command.chars() {
            match (letter, quote) {
                ('"' | '\'', None) => quote = Some(letter),
                (_, Some(open)) if letter == open => quote = None,
                (' ', None) => words.push(String::new()),
                _ => words.last_mut().unwrap().push(letter),
            }
        }
        words
    }

    #[test]
    fn every_verb_has_one_topic() {
        let command = Cli::command();
        let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let verbs: BTreeSet<&str> = verbs.map(Command::get_name).collect();
        let listed: Vec<&str> =
            TOPICS.iter().flat_map(|(_, verbs)| verbs.iter().copied()).collect();
        assert_eq!(listed.len(), verbs.len(), "no verb is listed twice");
        assert_eq!(BTreeSet::from_iter(listed), verbs);
    }

    #[test]
    fn every_verb_has_an_example_that_parses() {
        let named: Vec<&str> = EXAMPLES.iter().map(|(path, _)| *path).collect();
        let verbs = leaves(&Cli::command(), "");
        assert_eq!(BTreeSet::from_iter(named), verbs.iter().map(String::as_str).collect());
        for (path, examples) in EXAMPLES {
            for example in examples.lines() {
                let words = words(example);
                assert_eq!(words[0], "harvest", "{example}");
                assert!(words[1..].join(" ").starts_with(path), "{example}");
                let arguments = super::super::arguments(words.into_iter().map(Into::into));
                let parsed = Cli::command().try_get_matches_from(arguments);
                assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn help_fits_eighty_columns() {
        let help = command().term_width(80).render_help().to_string();
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn plurals_and_synonyms_are_suggested() {
        for (typed, verb) in [("sesions", "ls"), ("delete", "rm"), ("repos", "repo")] {
            assert_eq!(meant(typed), Some(verb), "{typed}");
            let error = command().try_get_matches_from(["harvest", typed]).unwrap_err();
            let shown = suggest(error).to_string();
            assert!(shown.contains("similar subcommand") && shown.contains(verb), "{shown}");
        }
        assert_eq!(meant("nosuch"), None);
        for (_, verb) in SYNONYMS {
            assert!(Cli::command().find_subcommand(verb).is_some(), "{verb}");
        }
    }
}
