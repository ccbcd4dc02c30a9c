//! What a body may say beyond its types: texts that end up on a command line, in an environment or in a
//! commit. Refused here, because further in there is nobody left to answer.

use axum::http::StatusCode;
use harvest_proto::{api::ExecRequest, bridge::Author};

use crate::problem::ApiError;

/// Longer than any name or address there is.
const MAX_AUTHOR_CHARS: usize = 200;

/// A command that the kernel can be given at all.
pub(crate) fn exec(request: &ExecRequest) -> Result<(), ApiError> {
    if request.argv.first().is_none_or(String::is_empty) {
        return Err(invalid("`argv` names no command"));
    }
    let texts = request.argv.iter().chain(&request.cwd).chain(&request.user);
    if texts.chain(request.env.values()).any(|text| text.contains('\0')) {
        return Err(invalid("the command holds a zero byte, which ends a text for the kernel"));
    }
    if request.env.keys().any(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(invalid("a variable's name is not empty and has no `=` in it"));
    }
    Ok(())
}

/// Somebody a commit can be by: git ends a name at `<` and a header at a line's end.
pub(crate) fn author(author: Option<&Author>) -> Result<(), ApiError> {
    let Some(author) = author else { return Ok(()) };
    let sound = |text: &str| {
        (1..=MAX_AUTHOR_CHARS).contains(&text.trim().chars().count())
            && !text.contains(|letter: char| letter.is_control() || letter == '<' || letter == '>')
    };
    match sound(&author.name) && sound(&author.email) {
        true => Ok(()),
        false => Err(invalid(
            "an author's name and email are 1 to 200 characters on one line, without `<` and `>`",
        )),
    }
}

/// A secret that holds something.
pub(crate) fn secret(value: &str) -> Result<(), ApiError> {
    match value.is_empty() {
        true => Err(invalid("the secret is empty").hint("delete it instead")),
        false => Ok(()),
    }
}

fn invalid(detail: &str) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(argv: &[&str]) -> ExecRequest {
        ExecRequest { argv: argv.iter().map(|text| (*text).to_owned()).collect(), ..ExecRequest::default() }
    }

    #[test]
    fn a_command_the_kernel_cannot_be_given_is_refused() {
        assert!(exec(&command(&["echo", ""])).is_ok());
        for bad in [command(&[]), command(&[""]), command(&["a\0b"]), command(&["a", "\0"])] {
            assert!(exec(&bad).is_err(), "{bad:?}");
        }
        for name in ["", "A=B", "A\0"] {
            let env = [(name.to_owned(), "x".to_owned())].into();
            assert!(exec(&ExecRequest { env, ..command(&["env"]) }).is_err(), "{name:?}");
        }
        let cwd = Some("/a\0".to_owned());
        assert!(exec(&ExecRequest { cwd, ..command(&["pwd"]) }).is_err());
    }

    #[test]
    fn an_author_cannot_write_more_of_a_commit_than_a_name() {
        let named = |name: &str| author(Some(&Author { name: name.into(), email: "a@b".into() }));
        assert!(named("Ada Lovelace").is_ok() && named("Åsa").is_ok() && author(None).is_ok());
        for bad in ["", "  ", "a\nb", "a <x@y>", "\u{1b}[31m", &"x".repeat(201)] {
            assert!(named(bad).is_err(), "{bad:?}");
        }
    }
}
