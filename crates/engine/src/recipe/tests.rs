//! What is a recipe, and what is said of a text that is none.

use super::*;

fn parse(text: &str) -> Result<Recipe, RecipeError> {
    Recipe::parse(text, Path::new("."))
}

fn step(line: &str) -> Result<Recipe, RecipeError> {
    parse(&format!("name = \"x\"\nfrom = \"base\"\n[[step]]\n{line}"))
}

#[test]
fn a_whole_recipe_is_read() {
    let text = r#"
        name = "tools"
        from = { debian = "bookworm", include = ["git", "curl", "git"] }
        [[step]]
        apt = ["jq"]
        [[step]]
        copy = { from = "files", to = "/app" }
        [[step]]
        env = { LANG = "C.UTF-8" }
        [[step]]
        user = "harvest"
        [[step]]
        workdir = "/workspace"
    "#;
    let recipe = parse(text).unwrap();
    let include = vec!["curl".to_owned(), "git".to_owned()];
    assert_eq!(recipe.from, Base::Debian { suite: "bookworm".to_owned(), include });
    assert_eq!(recipe.steps.len(), 5);
    assert_eq!(recipe.steps[1], Make::Copy { from: "files".into(), to: "/app".into() });
}

#[test]
fn an_unknown_key_is_named_with_the_nearest_known_one() {
    let said = |result: Result<Recipe, RecipeError>| result.unwrap_err().to_string();
    assert_eq!(
        said(parse("nmae = \"x\"")),
        "the recipe has the unknown key `nmae`; did you mean `name`?"
    );
    assert_eq!(
        said(step("workdri = \"/\"")),
        "step 1 has the unknown key `workdri`; did you mean `workdir`?"
    );
    assert_eq!(
        said(parse("name = \"x\"\nfrom = { debain = \"bookworm\" }")),
        "`from` has the unknown key `debain`; did you mean `debian`?"
    );
}

#[test]
fn an_image_starts_from_one_thing() {
    let from =
        |table: &str| parse(&format!("name = \"x\"\nfrom = {table}")).map(|recipe| recipe.from);
    assert_eq!(from("{ tar = \"a.tar.gz\" }").unwrap(), Base::Tar("a.tar.gz".into()));
    assert_eq!(from("{ oci = \"r.test/a:1\" }").unwrap(), Base::Oci("r.test/a:1".to_owned()));
    for wrong in [
        "{ tar = \"a\", folder = \"b\" }",
        "{ debian = \"bookworm\", oci = \"r.test/a\" }",
        "{ oci = \"debian\" }",
        "{ include = [\"a\"] }",
    ] {
        assert!(from(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    for line in [
        "apt = []",
        "apt = [\"-o=x\"]",
        "npm = \"one\"",
        "run = 1",
        "copy = { from = \"../../etc\", to = \"/x\" }",
        "copy = { from = \"/etc\", to = \"/x\" }",
        "copy = { from = \"a\", to = \"x\" }",
        "copy = { from = \"a\", to = \"/x/../../y\" }",
        "env = { \"A=B\" = \"c\" }",
        "user = \"somebody\"",
        "workdir = \"relative\"",
        "run = \"a\"\napt = [\"b\"]",
        "",
    ] {
        assert!(step(line).is_err(), "{line}");
    }
    for name in ["", "../x", "A", ".x", "a/b"] {
        assert!(parse(&format!("name = \"{name}\"\nfrom = \"base\"")).is_err(), "{name}");
    }
}
