//! Logins: asked for once, doubted when nobody answers with them, and never printed.

use super::*;

fn session() -> Session {
    let credentials = Credentials {
        user: "root".into(),
        password: "new".into(),
        former: vec!["old".into()],
    };
    Session::new(Some(credentials), false)
}

#[tokio::test]
async fn many_calls_log_in_once_and_again_when_the_token_is_not_known() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        let count = asked.fetch_add(1, Ordering::SeqCst);
        async move { Answer::Token(format!("token{count}.1"), 0) }
    };
    let first = session.ensure("a", None, ask).await.unwrap().unwrap();
    assert_eq!(first.0, Login::Accepted);
    assert_eq!(
        session.ensure("b", None, ask).await.unwrap(),
        Some(first.clone())
    );
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    let next = session.ensure("b", Some(first.1), ask).await.unwrap();
    assert_ne!(next, Some(first));
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_member_that_gives_none_out_is_followed_by_those_that_are_known() {
    let session = session();
    session.know(&["learner".to_owned(), "voter".to_owned()]);
    let ask = |member: String, _: Credentials| async move {
        match member.as_str() {
            "voter" => Answer::Token("t.1".into(), 1),
            _ => Answer::Silent,
        }
    };
    let found = session.ensure("learner", None, ask).await.unwrap();
    assert_eq!(found.map(|found| found.0), Some(Login::Former));
}

#[tokio::test]
async fn a_refusal_names_the_user_and_no_password_and_is_not_repeated_at_once() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        asked.fetch_add(1, Ordering::SeqCst);
        async { Answer::Refused }
    };
    for _ in 0..3 {
        let error = session.ensure("a", None, ask).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("user root"), "{text}");
        assert!(!text.contains("new") && !text.contains("old"), "{text}");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// Without a quorum nobody gives a token out; the calls that need none, or have one, are made all the same.
#[tokio::test]
async fn calls_do_not_wait_again_and_again_for_a_login_that_nobody_gives() {
    let (session, asked) = (session(), AtomicUsize::new(0));
    let ask = |_: String, _: Credentials| {
        asked.fetch_add(1, Ordering::SeqCst);
        async { Answer::Silent }
    };
    for _ in 0..3 {
        assert_eq!(session.ensure("a", None, ask).await.unwrap(), None);
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

fn shown(session: &Session) -> Option<String> {
    let token = session.token.read().unwrap();
    token
        .as_ref()
        .map(|token| token.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_login_with_which_nobody_answers_is_doubted_and_shown_until_there_is_another() {
    let session = session();
    let gives = |token: &'static str| {
        move |_: String, _: Credentials| async move { Answer::Token(token.into(), 0) }
    };
    let silent = |_: String, _: Credentials| async { Answer::Silent };
    let first = session.ensure("a", None, gives("a.9")).await.unwrap();
    let first = first.map(|(_, number)| number);
    // Answered, or given up at once.
    late(&session, first).await.answered();
    drop(session.shows(first, &ALONE));
    assert_eq!(session.take_doubt(), None);
    // Overtaken: a slow member is no reason to doubt.
    let overtaken = AtomicBool::new(false);
    let watch = session.shows(first, &overtaken);
    tokio::time::sleep(PATIENCE).await;
    overtaken.store(true, Ordering::Relaxed);
    drop(watch);
    assert_eq!(session.take_doubt(), None);
    drop(late(&session, first).await);
    let doubted = session.take_doubt();
    assert_eq!(doubted, first);
    assert_eq!(session.take_doubt(), None, "once");
    session.ensure("a", doubted, silent).await.unwrap();
    assert_eq!(shown(&session).as_deref(), Some("a.9"));
    assert_eq!(session.known(), first);
    // Not again and again, and not with a login that there is no more.
    drop(late(&session, first).await);
    assert_eq!(session.take_doubt(), None);
    session.found().doubt.since = None;
    session.found().silent = None;
    drop(late(&session, first).await);
    let doubted = session.take_doubt();
    assert_eq!(doubted, first);
    session.ensure("a", doubted, gives("b.1")).await.unwrap();
    assert_eq!(shown(&session).as_deref(), Some("b.1"));
    session.found().doubt.since = None;
    drop(late(&session, first).await);
    assert_eq!(session.take_doubt(), None);
}

async fn late(session: &Session, login: Option<u64>) -> Unanswered<'_> {
    let watch = session.shows(login, &ALONE);
    tokio::time::sleep(PATIENCE).await;
    watch
}

#[tokio::test]
async fn a_certificate_stands_in_for_a_login_that_is_doubted() {
    let certified = Session {
        certified: true,
        ..session()
    };
    let gives = |_: String, _: Credentials| async { Answer::Token("a.9".into(), 0) };
    let first = certified.ensure("a", None, gives).await.unwrap();
    let first = first.map(|(_, number)| number);
    drop(late(&certified, first).await);
    assert_eq!((shown(&certified), certified.known()), (None, None));
    assert_eq!(certified.current(), Some(Login::Accepted));
    // The certificate is not enough.
    assert_eq!(certified.take_back(), first);
    assert_eq!(shown(&certified).as_deref(), Some("a.9"));
    assert_eq!(certified.take_back(), None);
}

#[tokio::test]
async fn without_credentials_nobody_is_asked() {
    let session = Session::new(None, false);
    let ask = |_: String, _: Credentials| async { Answer::Refused };
    assert_eq!(session.ensure("a", None, ask).await.unwrap(), None);
}
