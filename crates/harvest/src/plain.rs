//! Text from elsewhere, made safe for a terminal: an agent, a repository or a server may say anything,
//! but not move the cursor, rename the window, type for the person or turn the line around. Pure.

use std::fmt::Write;

/// The text without escape sequences; line ends and tabs stay, any other control character is shown as
/// a sign that does nothing.
pub(crate) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(next) = rest.next() {
        match next {
            '\n' | '\t' => shown.push(next),
            // The first half of a line end; alone it would let a line write over itself.
            '\r' if rest.as_str().starts_with('\n') => {}
            '\u{1b}' => match sequence(rest.as_str()) {
                Some(after) => rest = after.chars(),
                None => shown.push('␛'),
            },
            _ => shown.push(sign(next).unwrap_or(next)),
        }
    }
    shown
}

/// The same on one line.
pub(crate) fn plain_line(text: &str) -> String {
    plain(text).replace(['\n', '\t'], " ")
}

/// The same for JSON that is printed already: escaped, so that it means what it meant.
pub(crate) fn plain_json(json: String) -> String {
    // What is below U+0020 cannot be there: JSON has it escaped already.
    if !json.contains(|letter| sign(letter).is_some() && letter > '\u{1f}') {
        return json;
    }
    let mut escaped = String::with_capacity(json.len());
    for letter in json.chars() {
        match sign(letter) {
            // All of them are in the first plane, so one escape is enough.
            Some(_) if letter > '\u{1f}' => {
                write!(escaped, "\\u{:04x}", u32::from(letter)).expect("a String takes everything");
            }
            _ => escaped.push(letter),
        }
    }
    escaped
}

/// What is shown in the place of a character that acts instead of being seen.
fn sign(letter: char) -> Option<char> {
    match letter {
        // Unicode has a picture of each.
        '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(letter)),
        '\u{7f}' => Some('␡'),
        '\u{80}'..='\u{9f}' => Some('�'),
        // They reorder what stands around them, so that what is read is not what is there.
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            Some('�')
        }
        _ => None,
    }
}

/// What comes after the sequence whose ESC was just read; `None` when it is no whole sequence.
fn sequence(text: &str) -> Option<&str> {
    match text.as_bytes().first()? {
        // ECMA-48: parameters and intermediates, then one final byte.
        b'[' => {
            let end = text[1..].find(|letter: char| !(' '..='?').contains(&letter))? + 1;
            let fits = ('@'..='~').contains(&text[end..].chars().next()?);
            fits.then(|| &text[end + 1..])
        }
        // A string for the terminal: title, clipboard, link; ends with BEL or ST.
        b']' | b'P' | b'X' | b'^' | b'_' => {
            let end = text.find(['\u{7}', '\u{1b}', '\n'])?;
            let tail = &text[end..];
            tail.strip_prefix('\u{7}').or_else(|| tail.strip_prefix("\u{1b}\\"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_titles_and_links_are_gone_and_the_words_stay() {
        assert_eq!(plain("\x1b[31;1mFAILED\x1b[0m (2)"), "FAILED (2)");
        assert_eq!(plain("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c"), "abc");
        assert_eq!(plain("\x1b[2J\x1b[H\x1b[?1049hx"), "x");
        assert_eq!(plain("ä\tb\r\nc → ✓\n"), "ä\tb\nc → ✓\n");
    }

    #[test]
    fn nothing_that_acts_is_left_whatever_it_is_made_of() {
        let nasty = "\x1b\x1b[\x1b]0;x\n\x1b[31\u{9b}31m\u{202e}evil\rgood\x08\x7f\0\x1bc\x1b[\x1b[mä\x1b]52;c;\x1b";
        let shown = plain(nasty);
        let acts = |letter: char| sign(letter).is_some() && letter != '\n' && letter != '\t';
        assert!(!shown.contains(acts), "{shown:?}");
        assert_eq!(plain_line("one\ntwo\tthree"), "one two three");
    }

    #[test]
    fn json_means_the_same_and_holds_nothing_that_acts() {
        let text = "a\u{9b}31m\u{202e}\x1b[31m\u{7f}ä";
        let json = plain_json(serde_json::to_string(text).unwrap());
        assert!(!json.contains(|letter| sign(letter).is_some()), "{json:?}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        let pretty = plain_json(serde_json::to_string_pretty(&[text]).unwrap());
        assert_eq!(serde_json::from_str::<[String; 1]>(&pretty).unwrap(), [text]);
    }
}
