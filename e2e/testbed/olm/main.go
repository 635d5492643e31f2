// Program olm-validate checks a bundle of the Operator Lifecycle Manager (OLM), with the validators of the operator
// framework: those of `opm alpha bundle validate`, and those that operatorhub.io requires.
//
// The argument is the directory with the directories manifests and metadata. The program prints each warning to the
// standard output, and each error to the standard error. It exits with 0 if there is no error, with 1 if there is an
// error, and with 2 if the bundle cannot be read.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"

	"github.com/operator-framework/api/pkg/manifests"
	"github.com/operator-framework/api/pkg/validation"
	interfaces "github.com/operator-framework/api/pkg/validation/interfaces"
	"github.com/operator-framework/operator-registry/pkg/lib/bundle"
	"github.com/sirupsen/logrus"
)

// validators are the default validators of the operator framework, and all optional validators that need neither a
// registry nor a container tool.
var validators = interfaces.Validators{
	validation.ClusterServiceVersionValidator,
	validation.CustomResourceDefinitionValidator,
	validation.BundleValidator,
	validation.OperatorHubV2Validator,
	validation.StandardCapabilitiesValidator,
	validation.StandardCategoriesValidator,
	validation.ObjectValidator,
	validation.GoodPracticesValidator,
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: olm-validate DIRECTORY")
		os.Exit(2)
	}
	errors, warnings, err := check(os.Args[1])
	if err != nil {
		fmt.Fprintf(os.Stderr, "cannot read the bundle: %v\n", err)
		os.Exit(2)
	}
	for _, line := range warnings {
		fmt.Println(line)
	}
	for _, line := range errors {
		fmt.Fprintln(os.Stderr, line)
	}
	if len(errors) > 0 {
		os.Exit(1)
	}
}

// check returns the errors and the warnings of all validators, each sorted and without duplicates.
func check(directory string) (errors, warnings []string, err error) {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	// The validators of opm have no warnings.
	opm := bundle.NewImageValidator(nil, logrus.NewEntry(logger))
	for _, failure := range []error{
		opm.ValidateBundleFormat(directory),
		opm.ValidateBundleContent(filepath.Join(directory, "manifests")),
	} {
		if list, ok := failure.(bundle.ValidationError); ok {
			for _, entry := range list.Errors {
				errors = append(errors, entry.Error())
			}
		} else if failure != nil {
			errors = append(errors, failure.Error())
		}
	}
	read, err := manifests.GetBundleFromDir(directory)
	if err != nil {
		return nil, nil, err
	}
	for _, result := range validators.Validate(read.ObjectsToValidate()...) {
		for _, entry := range result.Errors {
			errors = append(errors, entry.Error())
		}
		for _, entry := range result.Warnings {
			warnings = append(warnings, entry.Error())
		}
	}
	return unique(errors), unique(warnings), nil
}

func unique(lines []string) []string {
	sort.Strings(lines)
	var kept []string
	for i, line := range lines {
		if i == 0 || line != lines[i-1] {
			kept = append(kept, line)
		}
	}
	return kept
}
