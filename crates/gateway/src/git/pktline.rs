//! The parts of git's wire protocol that decide about a push: the commands at its start and the
//! report at its end (gitprotocol-pack, "Reference Update Request" and "Report Status"). Pure and
//! strict: anything that does not parse exactly is refused, so that no command passes unchecked.

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

const REPORT_STATUS: &str = "report-status";
// A session may push only one branch; even a mirror of a large repository has a shorter head.
pub(super) const MAX_HEAD_BYTES: usize = 64 * 1024;
// gitprotocol-common: a line has at most 65516 bytes of data.
const MAX_DATA_BYTES: usize = 65_516;
// A report has one line per command, and there is one command.
const MAX_REPORT_BYTES: usize = 64 * 1024;

/// The commands of a push.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Commands {
    pub(super) commands: Vec<Command>,
    capabilities: Vec<String>,
}

/// An update of a reference.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// The commit that the reference is expected to be at; zeros if it does not exist.
    pub(super) old: String,
    /// The commit.
    pub(super) new: String,
    pub(super) reference: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Objection<'a> {
    pub(super) command: &'a Command,
    pub(super) reason: String,
}

impl Command {
    fn deletes(&self) -> bool {
        is_zero(&self.new)
    }

    /// Whether the reference is to be created.
    pub(super) fn creates(&self) -> bool {
        is_zero(&self.old)
    }
}

fn is_zero(id: &str) -> bool {
    id.bytes().all(|byte| byte == b'0')
}

impl Commands {
    /// Reads the commands at the start of a push, with their length in bytes; `None` when more
    /// bytes are needed.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, &'static str> {
        match read_commands(bytes)? {
            None if bytes.len() > MAX_HEAD_BYTES => Err("the push has too many commands"),
            read => Ok(read),
        }
    }

    /// True when the client requested this capability.
    pub(super) fn requests(&self, capability: &str) -> bool {
        self.capabilities.iter().any(|given| given == capability)
    }

    fn requests_report(&self) -> bool {
        self.requests(REPORT_STATUS) || self.requests("report-status-v2")
    }

    /// Checks every command: only this branch, no deletion. One objection refuses the whole push.
    pub(super) fn objections(&self, branch: Option<&str>) -> Vec<Objection<'_>> {
        let reason = |command: &Command| {
            let Some(branch) = branch else {
                return Some("this session has read-only access".to_owned());
            };
            if command.reference != format!("refs/heads/{branch}") {
                return Some(format!(
                    "this session may only push to its branch: git push origin HEAD:{branch}"
                ));
            }
            let refused = if command.deletes() {
                "this session may not delete its branch"
            } else if command.old == command.new {
                "the push changes nothing"
            } else {
                return None;
            };
            Some(refused.to_owned())
        };
        let refused = self
            .commands
            .iter()
            .filter_map(|command| Some(Objection { command, reason: reason(command)? }));
        let mut refused: Vec<_> = refused.collect();
        if refused.is_empty() {
            refused.extend(self.commands.iter().skip(1).map(|command| Objection {
                command,
                reason: "a push may update its branch only once".to_owned(),
            }));
        }
        let unsupported = if self.requests("push-options") {
            Some("push options are not supported")
        } else if !self.requests_report() {
            Some("a push without report-status is not supported")
        } else {
            None
        };
        if let (Some(reason), true) = (unsupported, refused.is_empty()) {
            let all = self
                .commands
                .iter()
                .map(|command| Objection { command, reason: reason.to_owned() });
            refused.extend(all);
        }
        refused
    }

    /// The response that git shows as `! [remote rejected] … (reason)`; `None` when the client
    /// requested no report.
    pub(super) fn refusal(&self, objections: &[Objection<'_>]) -> Option<Vec<u8>> {
        if !self.requests_report() {
            return None;
        }
        let mut report = line(b"unpack ok\n");
        for command in &self.commands {
            let own = objections.iter().find(|objection| objection.command == command);
            let reason =
                own.map_or("another part of this push was refused", |own| own.reason.as_str());
            report.extend(line(format!("ng {} {reason}\n", command.reference).as_bytes()));
        }
        report.extend(b"0000");
        Some(match self.requests("side-band-64k") {
            true => {
                let banded = report
                    .chunks(MAX_DATA_BYTES - 1)
                    .flat_map(|part| line(&[b"\x01", part].concat()));
                banded.chain(*b"0000").collect()
            }
            false => report,
        })
    }
}

// `Ok(None)` when the bytes end before the commands do.
fn read_commands(bytes: &[u8]) -> Result<Option<(Commands, usize)>, &'static str> {
    let (mut rest, mut read) = (bytes, Commands::default());
    loop {
        let Some((line, more)) = next_line(rest)? else { return Ok(None) };
        rest = more;
        let Some(data) = line else { return Ok(Some((read, bytes.len() - rest.len()))) };
        let text = std::str::from_utf8(data).map_err(|_| "a command is not text")?;
        let text = text.strip_suffix('\n').unwrap_or(text);
        let shallow = text.strip_prefix("shallow ");
        if shallow.is_some_and(is_object) && read.commands.is_empty() {
            continue;
        }
        let (command, capabilities) = match (text.split_once('\0'), read.commands.is_empty()) {
            (Some((command, capabilities)), true) => (command, capabilities),
            (None, _) => (text, ""),
            (Some(_), false) => return Err("a push has capabilities twice"),
        };
        read.capabilities.extend(capabilities.split_ascii_whitespace().map(str::to_owned));
        read.commands.push(command_from(command)?);
    }
}

fn command_from(text: &str) -> Result<Command, &'static str> {
    let mut words = text.splitn(3, ' ');
    let (Some(old), Some(new), Some(reference)) = (words.next(), words.next(), words.next()) else {
        return Err("a command is not `old new reference`");
    };
    let plain =
        reference.starts_with("refs/") && reference.bytes().all(|byte| byte > b' ' && byte != 0x7f);
    if !is_object(old) || !is_object(new) || old.len() != new.len() || !plain {
        return Err("a command is not `old new reference`");
    }
    let [old, new, reference] = [old, new, reference].map(str::to_owned);
    Ok(Command { old, new, reference })
}

fn is_object(text: &str) -> bool {
    matches!(text.len(), 40 | 64)
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

type Line<'a> = (Option<&'a [u8]>, &'a [u8]);

// The next line and the bytes after it. A line of `None` is a flush. Delimiters of protocol 2 and
// empty lines are not allowed in a push.
fn next_line(bytes: &[u8]) -> Result<Option<Line<'_>>, &'static str> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    if !prefix.iter().all(u8::is_ascii_hexdigit) {
        return Err("a line has no length");
    }
    let digits = std::str::from_utf8(prefix).map_err(|_| "a line has no length")?;
    match usize::from_str_radix(digits, 16).map_err(|_| "a line has no length")? {
        0 => Ok(Some((None, rest))),
        1..=4 => Err("a line has no content"),
        length if length - 4 > MAX_DATA_BYTES => Err("a line is too long"),
        length => Ok(rest.split_at_checked(length - 4).map(|(data, rest)| (Some(data), rest))),
    }
}

/// A push without objects that sets a reference to a commit that the remote has.
pub(super) fn set_reference(reference: &str, old: Option<&str>, commit: &str) -> Vec<u8> {
    let old = old.map_or_else(|| "0".repeat(commit.len()), str::to_owned);
    let command = format!("{old} {commit} {reference}\0 {REPORT_STATUS}");
    // A pack of version 2 with no objects, and its hash.
    let mut pack = b"PACK\0\0\0\x02\0\0\0\0".to_vec();
    let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, &pack);
    pack.extend(hash.as_ref());
    [line(command.as_bytes()), b"0000".to_vec(), pack].concat()
}

fn line(data: &[u8]) -> Vec<u8> {
    [format!("{:04x}", data.len() + 4).as_bytes(), data].concat()
}

/// Reads the report from the remote's response to a push.
#[derive(Debug)]
pub(super) struct Report {
    banded: bool,
    raw: Vec<u8>,
    report: Vec<u8>,
    broken: bool,
}

impl Report {
    pub(super) fn of(commands: &Commands) -> Self {
        Self {
            banded: commands.requests("side-band-64k"),
            raw: Vec::new(),
            report: Vec::new(),
            broken: false,
        }
    }

    /// Of the response to [`set_reference`].
    pub(super) fn plain() -> Self {
        Self { banded: false, raw: Vec::new(), report: Vec::new(), broken: false }
    }

    /// Reads more of the response.
    pub(super) fn observe(&mut self, bytes: &[u8]) {
        if self.broken || self.report.len() > MAX_REPORT_BYTES {
            return;
        }
        if !self.banded {
            return self.report.extend_from_slice(bytes);
        }
        self.raw.extend_from_slice(bytes);
        let mut rest = &self.raw[..];
        loop {
            match next_line(rest) {
                Ok(Some((data, more))) => {
                    if let Some([1, report @ ..]) = data {
                        self.report.extend_from_slice(report);
                    }
                    rest = more;
                }
                Ok(None) => break,
                Err(_) => return self.broken = true,
            }
        }
        self.raw = rest.to_vec();
    }

    /// Whether the remote accepted the update of this reference. `None` until the report is
    /// complete.
    pub(super) fn accepted(&self, reference: &str) -> Option<bool> {
        let (mut rest, mut unpacked, mut accepted) = (&self.report[..], false, false);
        loop {
            let (data, more) = next_line(rest).ok()??;
            rest = more;
            let Some(data) = data else { return Some(unpacked && accepted) };
            let text = String::from_utf8_lossy(data);
            let text = text.strip_suffix('\n').unwrap_or(&text);
            unpacked |= text == "unpack ok";
            accepted |= text.strip_prefix("ok ") == Some(reference);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: &str = "1111111111111111111111111111111111111111";
    const NEW: &str = "2222222222222222222222222222222222222222";
    const ZERO: &str = "0000000000000000000000000000000000000000";
    const CAPABILITIES: &str = "report-status side-band-64k agent=git/2";

    fn push(commands: &[(&str, &str)], capabilities: &str) -> Vec<u8> {
        let lines = commands.iter().enumerate().flat_map(|(index, (new, reference))| {
            let tail = if index == 0 { format!("\0 {capabilities}") } else { String::new() };
            line(format!("{OLD} {new} {reference}{tail}").as_bytes())
        });
        lines.chain(*b"0000").collect()
    }

    fn reasons(commands: &[(&str, &str)], branch: Option<&str>) -> Vec<String> {
        let Ok(Some((read, _))) = Commands::read(&push(commands, CAPABILITIES)) else {
            panic!("does not parse")
        };
        read.objections(branch).into_iter().map(|objection| objection.reason).collect()
    }

    #[test]
    fn own_branch_may_be_created_and_updated() {
        assert!(reasons(&[(NEW, "refs/heads/mine")], Some("mine")).is_empty());
    }

    #[test]
    fn other_updates_and_readers_are_refused() {
        for (commands, branch) in [
            (&[(NEW, "refs/heads/main")][..], Some("mine")),
            (&[(NEW, "refs/tags/mine")], Some("mine")),
            (&[(NEW, "refs/heads/mine/x")], Some("mine")),
            (&[(NEW, "refs/heads/MINE")], Some("mine")),
            (&[(ZERO, "refs/heads/mine")], Some("mine")),
            (&[(NEW, "refs/heads/mine"), (NEW, "refs/heads/main")], Some("mine")),
            (&[(NEW, "refs/heads/mine"), (NEW, "refs/heads/mine")], Some("mine")),
            (&[(NEW, "refs/heads/mine")], None),
        ] {
            assert!(!reasons(commands, branch).is_empty(), "{commands:?}");
        }
    }

    #[test]
    fn push_options_and_certificates_are_refused() {
        let Ok(Some((read, _))) =
            Commands::read(&push(&[(NEW, "refs/heads/mine")], "report-status push-options"))
        else {
            panic!("does not parse")
        };
        assert_eq!(read.objections(Some("mine")).len(), 1);
        let certificate = [line(b"push-cert\0report-status\n"), b"0000".to_vec()].concat();
        assert!(Commands::read(&certificate).is_err());
    }

    #[test]
    fn bytes_after_the_commands_are_not_read() {
        let bytes = push(&[(NEW, "refs/heads/mine")], CAPABILITIES);
        let with_pack = [&bytes[..], b"PACK...."].concat();
        assert!(
            matches!(Commands::read(&with_pack), Ok(Some((_, length))) if length == bytes.len())
        );
        let shallow = [line(format!("shallow {OLD}\n").as_bytes()), bytes].concat();
        assert!(
            matches!(Commands::read(&shallow), Ok(Some((read, _))) if read.commands.len() == 1)
        );
    }

    #[test]
    fn refusal_is_a_git_report() {
        let Ok(Some((read, _))) =
            Commands::read(&push(&[(NEW, "refs/heads/main")], "report-status"))
        else {
            panic!("does not parse")
        };
        let refusal = read.refusal(&read.objections(Some("mine"))).unwrap();
        let expected = "000eunpack ok\n005bng refs/heads/main this session may only push to its branch: git push origin HEAD:mine\n0000";
        assert_eq!(String::from_utf8(refusal).unwrap(), expected);
    }

    #[test]
    fn push_counts_only_when_remote_reports_success() {
        let Ok(Some((commands, _))) =
            Commands::read(&push(&[(NEW, "refs/heads/mine")], CAPABILITIES))
        else {
            panic!("does not parse")
        };
        let report =
            [line(b"unpack ok\n"), line(b"ok refs/heads/mine\n"), b"0000".to_vec()].concat();
        let (first, second) = report.split_at(9);
        let answer = [
            line(b"\x02progress"),
            line(&[b"\x01", first].concat()),
            line(b"\x02more"),
            line(&[b"\x01", second].concat()),
            b"0000".to_vec(),
        ]
        .concat();
        let mut seen = Report::of(&commands);
        for byte in &answer[..answer.len() - 8] {
            seen.observe(&[*byte]);
        }
        assert_eq!(seen.accepted("refs/heads/mine"), None);
        seen.observe(&answer[answer.len() - 8..]);
        assert_eq!(seen.accepted("refs/heads/mine"), Some(true));
        assert_eq!(seen.accepted("refs/heads/main"), Some(false));
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Commands::read(&bytes);
            let mut report = Report { banded: true, raw: vec![], report: vec![], broken: false };
            report.observe(&bytes);
            report.accepted("refs/heads/mine");
        }

        #[test]
        fn damaged_push_never_updates_another_reference(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = push(&[(NEW, "refs/heads/main"), (NEW, "refs/heads/mine")], CAPABILITIES);
            let index = at.index(bytes.len());
            bytes[index] = byte;
            if let Ok(Some((read, length))) = Commands::read(&bytes) {
                // The parsed commands cover every byte before the pack.
                let names: usize = read.commands.len();
                prop_assert!(length <= bytes.len());
                if read.objections(Some("mine")).is_empty() {
                    prop_assert!(names <= 1);
                    prop_assert!(!bytes[..length].windows(15).any(|part| part == b"refs/heads/main"));
                }
            }
        }

        #[test]
        fn only_one_update_of_own_branch_passes(
            references in prop::collection::vec("refs/(heads|tags)/(mine|main|mine2)", 0..4),
            zero in any::<bool>(),
        ) {
            let new = if zero { ZERO } else { NEW };
            let commands: Vec<_> =
                references.iter().map(|reference| (new, reference.as_str())).collect();
            let passes = reasons(&commands, Some("mine")).is_empty();
            let good = commands.is_empty() || (references == ["refs/heads/mine"] && !zero);
            prop_assert_eq!(passes, good);
        }

        #[test]
        fn truncated_push_is_partial(cut in any::<prop::sample::Index>()) {
            let bytes = push(&[(NEW, "refs/heads/mine")], CAPABILITIES);
            let head = &bytes[..cut.index(bytes.len())];
            prop_assert_eq!(Commands::read(head), Ok(None));
        }
    }
}
